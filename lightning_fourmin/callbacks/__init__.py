"""Callbacks that watch a run, and save or end it where that is due."""
