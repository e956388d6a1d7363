"""Callbacks that make visible what a run does."""
