"""The tools that make shards of image folders and check every byte of shards.

`pack.py` and `verify.py` have the same shape: the main process makes a list of tasks, one a shard, `process_pool.py`
runs them in worker processes, and the main process puts the results together. Only the main process writes the index.
"""
