"""A connection of one's own to the store of the process group: one that waits holds up nobody else's."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

STORE_ANSWER_S = 5.0


def own_store(purpose: str) -> dist.Store:
    """The store under keys of its own; what is asked for and not there is waited for up to `STORE_ANSWER_S`."""
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=STORE_ANSWER_S))
    return dist.PrefixStore(f"fourmin/{purpose}", store)
