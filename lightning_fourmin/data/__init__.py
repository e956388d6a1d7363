"""Tar shards: packed, verified, and read in an order that is the same line of samples on any number of ranks."""
