"""Tar shards: packed, verified, and read in an order that does not depend on the number of ranks.

    datamodule.py     main process: makes loaders for a Trainer, normalises images on the device, resumes
    loader.py         main process: requests batches from the workers, counts epochs and skipped samples
    partition.py      arithmetic: which rank, worker and batch has which positions of an epoch
    order.py          arithmetic: which sample stands at each position
    dataset.py        worker: loads the batch of a request
    reader.py         worker: opens shards and streams samples; tar.py reads one shard, urls.py opens it anywhere
    transforms.py     worker: makes pixels of a sample; sample.py is what it gets, decode.py has the decoders

`index.py` is the file that says which shards there are, `pack/` the tools that make and check shards, `digits.py` demo
data.
"""
