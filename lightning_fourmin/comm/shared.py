"""Memory that the ranks of a group on one node share: gradients cross a node without passing through sockets.

    member 0   [ inputs | sums ]      each member writes its own two areas and reads those of all;
    member 1   [ inputs | sums ]      a message of one byte says that an area is ready

The memory is anonymous: it has no name that could be left behind, and goes with the last process that maps it.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fourmin.comm.members import Members

ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """The stretch of shared memory of one piece, as seen by every member: by member, its gradients and its sums."""

    inputs: list[Tensor]
    sums: list[Tensor]


class SharedArena:
    """The areas of all members, handed out in one order on every member, round and round."""

    def __init__(self, areas: list[Tensor], members: Members) -> None:
        self.members = members
        self._num_bytes = areas[0].numel() // 2
        self._inputs = [area[: self._num_bytes] for area in areas]
        self._sums = [area[self._num_bytes :] for area in areas]
        self._next = 0
        self._placed: deque[tuple[int, int, Callable[[], None]]] = deque()

    @classmethod
    def open(cls, members: Members, num_bytes: int) -> "SharedArena | None":
        """Maps the areas of all members, or None on all of them if one cannot (no common process namespace, say)."""
        num_bytes = _aligned(num_bytes)
        if not hasattr(os, "memfd_create"):
            return None
        mine = os.memfd_create("fourmin")
        try:
            os.ftruncate(mine, 2 * num_bytes)
            paths: list[str] = [""] * len(members.ranks)
            dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{mine}", group=members.group)
            try:
                areas = [torch.from_file(path, shared=True, size=2 * num_bytes, dtype=torch.uint8) for path in paths]
            except RuntimeError:
                areas = []
            mapped: list[bool] = [False] * len(members.ranks)
            dist.all_gather_object(mapped, bool(areas), group=members.group)
        finally:
            os.close(mine)
        return cls(areas, members) if all(mapped) else None

    def place(self, numel: int, dtype: torch.dtype, wait_until_done: Callable[[], None]) -> Slot | None:
        """The next stretch, once the pieces that used it are done; None if the piece is larger than an area.

        Every member places the same pieces in the same order, so they agree on stretches without a word. A piece that
        is done here was read by all others: its sums reached us only after they had read our gradients, and before a
        member may write new sums it has heard from us about the new piece, so we have read its old ones.
        """
        num_bytes = _aligned(numel * dtype.itemsize)
        if num_bytes > self._num_bytes:
            return None
        start = self._next if self._next + num_bytes <= self._num_bytes else 0
        stop = self._next = start + num_bytes
        in_the_way = [i for i, (first, last, _) in enumerate(self._placed) if first < stop and start < last]
        for _ in range(max(in_the_way, default=-1) + 1):
            self._placed.popleft()[2]()
        self._placed.append((start, stop, wait_until_done))

        def typed(areas: list[Tensor]) -> list[Tensor]:
            return [area[start : start + numel * dtype.itemsize].view(dtype) for area in areas]

        return Slot(typed(self._inputs), typed(self._sums))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
