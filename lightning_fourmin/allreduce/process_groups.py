"""Process groups of the engine, made once a process and reused by every later fit."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from lightning_fourmin.allreduce.broadcast_object import gathered
from lightning_fourmin.allreduce.members import Members

Key = tuple[str, tuple[int, ...]]


class ProcessGroups:
    """Groups by (purpose, ranks) on top of one default group.

    Groups are of the engine alone: the default group belongs to the main thread. Each purpose has groups of its own,
    because a group may be driven by one thread only.
    """

    _cached: "ProcessGroups | None" = None

    def __init__(self, timeout: timedelta, number: int = 0) -> None:
        """`number`: how many others there were on this default group, the same on all ranks."""
        self._world = dist.group.WORLD
        self.timeout, self.number = timeout, number
        self._groups: dict[Key, dist.ProcessGroup] = {}
        self.clean = True
        """False once an engine stopped with messages under way: they could reach the next user of the groups."""

    @classmethod
    def shared(cls, timeout: timedelta | None) -> "ProcessGroups":
        """The groups of this process; all ranks start afresh together if any of them must."""
        cached, timeout = cls._cached, timeout or default_pg_timeout
        reusable = (
            cached is not None and cached._world is dist.group.WORLD and cached.timeout == timeout and cached.clean
        )
        all_reusable = all(gathered(reusable))
        if cached is None or not all_reusable:
            same_world = cached is not None and cached._world is dist.group.WORLD
            cached = cls._cached = cls(timeout, cached.number + 1 if cached is not None and same_world else 0)
        return cached

    def members(self, purpose: str, all_ranks: tuple[tuple[int, ...], ...]) -> Members | None:
        """This rank's group among disjoint `all_ranks`; entered by all ranks in the same order, as torch demands."""
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
