"""Image folders to tar shards, and the check of every byte."""
