"""The LARS optimizer, its parameter groups, and schedules of the learning rate."""
