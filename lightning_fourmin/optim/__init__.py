"""LARS, its parameter groups, and the schedules of the rate."""
