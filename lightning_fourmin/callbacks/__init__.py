"""Callbacks that measure, check, seed and save a run; each works with any strategy of Lightning."""
