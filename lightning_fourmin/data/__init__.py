"""Tar shards: packed, verified, and read in an order that does not depend on the number of ranks."""
