"""What ranks tell each other before they go on together; collective calls."""

from typing import TypeVar

import torch.distributed as dist

V = TypeVar("V")


def gathered(value: V, group: dist.ProcessGroup | None = None) -> list[V]:
    """Everyone's value, in the order of ranks."""
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def agreed(value: V) -> V:
    """Rank 0's value, on all ranks."""
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]
