"""Callbacks that measure, check, seed and save a run."""
