"""The process groups of the engine, and what ranks tell each other over the default group before they go on together.

Which thread uses which group: the main thread uses the default group (Lightning's broadcast before a batch,
`sync_dist`, DDP's buffers); every group made here belongs to one stage of the engine, hence to one thread. Inside a
group the backend matches collectives by the order in which they are issued, so two threads that used one group would
pair the wrong ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

V = TypeVar("V")
Key = tuple[str, tuple[int, ...]]


def gather_objects(value: V, group: dist.ProcessGroup | None = None) -> list[V]:
    """The value of every rank, in the order of ranks; a collective call."""
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def broadcast_object(value: V) -> V:
    """Rank 0's value, on all ranks; a collective call."""
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def from_rank_0(work: Callable[[], V]) -> V:
    """The result of rank 0's `work` on all ranks, or its error on all ranks; a collective call."""
    found: V | ValueError | OSError | None = None
    if dist.get_rank() == 0:
        try:
            found = work()
        except (ValueError, OSError) as error:
            found = error
    found = broadcast_object(found)
    if isinstance(found, ValueError | OSError):
        raise found
    return cast(V, found)


@dataclass(frozen=True)
class Members:
    """A process group as one of its members sees it: the ranks in it and this rank's place; place 0 is the leader."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int

    @property
    def others(self) -> list[int]:
        """Places of the other members, the next one first, so that not all send to the same member at once."""
        return [(self.index + i) % len(self.ranks) for i in range(1, len(self.ranks))]


class ProcessGroups:
    """Groups by (purpose, ranks) on top of one default group, made once a process and reused by every later fit.

    Each Trainer brings a new strategy, and all ranks have to meet to make a group, so the process keeps its groups.
    They are made in the main thread of every rank. After an engine has stopped with messages in flight (`clean` is
    False) all ranks make new ones together: a late message could otherwise reach the next user of the group.
    """

    _cached: "ProcessGroups | None" = None

    def __init__(self, timeout: timedelta) -> None:
        self._world = dist.group.WORLD
        self.timeout = timeout
        self._groups: dict[Key, dist.ProcessGroup] = {}
        self.clean = True
        """False once an engine has stopped with messages in flight."""

    @classmethod
    def shared(cls, timeout: timedelta | None) -> "ProcessGroups":
        """The groups of this process; if any rank must begin with new ones, all do. A collective call."""
        cached, timeout = cls._cached, timeout or default_pg_timeout
        reusable = (
            cached is not None and cached._world is dist.group.WORLD and cached.timeout == timeout and cached.clean
        )
        # Every rank has to vote, also one that has nothing to reuse.
        if not all(gather_objects(reusable)) or cached is None:
            cached = cls._cached = cls(timeout)
        return cached

    def members(self, purpose: str, all_ranks: tuple[tuple[int, ...], ...]) -> Members | None:
        """This rank's group among disjoint `all_ranks`; None if this rank is in none of them, or alone in its own.

        All ranks call this in the same order, also for groups that they are not in, because torch demands that.
        """
        mine = None
        for ranks in all_ranks:
            if len(ranks) == 1:
                continue
            key = (purpose, ranks)
            if key not in self._groups:
                # Not sorted: the place among the members is the place in the group.
                self._groups[key] = dist.new_group(
                    list(ranks), timeout=self.timeout, group_desc=f"fourmin_{purpose}", sort_ranks=False
                )
            if dist.get_rank() in ranks:
                mine = Members(self._groups[key], ranks, ranks.index(dist.get_rank()))
        return mine
