"""The folder that a run leaves, its record and its curves, and how a run resumes from it."""
