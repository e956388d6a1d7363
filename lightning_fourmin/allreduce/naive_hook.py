"""A communication hook in its simplest form: one flat all-reduce a bucket, and backward waits for it.

Read this before `engine.py`. The engine computes the same mean of the same buckets; what it adds is a plan that chooses
how each bucket travels, stages that overlap, shared memory inside a node, and 16-bit wires. A test holds the engine to
this hook: bit-equal where it runs a ring, and up to the order of summation elsewhere.

    DDP fills a bucket  ->  hook(state, bucket) -> Future  ->  DDP copies the result back into `.grad`
"""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


def naive_all_reduce_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of a bucket over all ranks of a group; `model.register_comm_hook(None, naive_all_reduce_hook)`."""
    gradients = bucket.buffer()
    # DDP hands the gradients of this rank over undivided when a hook runs. They are multiplied before the sum, as DDP
    # itself does it: a sum that is divided afterwards differs in the last bits, and may overflow in 16 bit.
    gradients.mul_(1 / dist.get_world_size(group))
    # Every rank calls its hook for the same buckets in the same order, so collectives match by their order alone.
    dist.all_reduce(gradients, group=group)
    # DDP waits for all futures at the end of backward; one that is never set would block it for ever.
    future: Future[Tensor] = Future()
    future.set_result(gradients)
    return future
