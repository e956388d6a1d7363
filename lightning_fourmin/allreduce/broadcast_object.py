"""What ranks tell each other before they go on together; collective calls."""

from collections.abc import Callable
from typing import TypeVar, cast

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


def from_rank_0(work: Callable[[], V]) -> V:
    """What rank 0's work gives, on all ranks, or its error."""
    found: V | ValueError | OSError | None = None
    if dist.get_rank() == 0:
        try:
            found = work()
        except (ValueError, OSError) as error:
            found = error
    found = agreed(found)
    if isinstance(found, ValueError | OSError):
        raise found
    return cast(V, found)
