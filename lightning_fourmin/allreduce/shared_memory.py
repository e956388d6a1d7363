"""Memory that the ranks of a group on one node share: gradients cross a node without passing through sockets.

    leader     [ gradients | sums ]      each member writes gradients into its own area and sums into the leader's,
    member 1   [ gradients ]             and reads those of all; bells say that something is ready

The memory is anonymous: it has no name that could be left behind, and goes with the last process that maps it.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fourmin.allreduce.broadcast_object import gathered
from lightning_fourmin.allreduce.members import Members
from lightning_fourmin.allreduce.ready_pipes import Bells
from lightning_fourmin.files import file_in_memory

ALIGNMENT = 64
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """A stretch of shared memory in the wire's dtype: the gradients of every member, and their sums."""

    gradients: list[Tensor]
    sums: Tensor

    def narrow(self, start: int, numel: int) -> "Slot":
        return Slot([area[start : start + numel] for area in self.gradients], self.sums[start : start + numel])


class SharedArena:
    """The areas of a group, handed out in one order on every member: steps take turns at the two halves.

    So a step finds memory that an earlier one has touched, whatever its size: the first touch of a page is slow.
    """

    def __init__(self, areas: list[Tensor], members: Members, inward: Bells, outward: Bells) -> None:
        self.members, self.inward, self.outward = members, inward, outward
        self._num_bytes = areas[0].numel() // 2
        self._gradients = [area[: self._num_bytes] for area in areas]
        self._sums = areas[0][self._num_bytes :]
        self._next = self._first = 0
        self._placed: deque[tuple[int, int, Callable[[], object]]] = deque()

    @classmethod
    def open(cls, members: Members, num_bytes: int, timeout_s: float) -> "SharedArena | None":
        """Maps the areas of all members, or None on all of them if one cannot (no common process namespace, say)."""
        num_bytes = _aligned(num_bytes)
        inward, outward = Bells(members, timeout_s), Bells(members, timeout_s)
        descriptor = file_in_memory("fourmin")
        path, token = "", os.urandom(TOKEN_BYTES)
        areas: list[Tensor] = []
        try:
            with suppress(OSError):  # without a path no member can map the area, and all do without
                inward.make()
                outward.make()
                if descriptor is not None:
                    os.ftruncate(descriptor, 2 * num_bytes)  # takes memory only where it is written
                    os.pwrite(descriptor, token, 0)
                    path = f"/proc/{os.getpid()}/fd/{descriptor}"
            offers = gathered((path, token, inward.paths, outward.paths), members.group)
            try:
                areas = _mapped([offer[:2] for offer in offers], 2 * num_bytes)
                inward.open([offer[2] for offer in offers])
                outward.open([offer[3] for offer in offers])
            except (OSError, RuntimeError):
                areas = []
            mapped = gathered(bool(areas), members.group)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        arena = cls(areas, members, inward, outward) if all(mapped) else None
        for bells in (inward, outward):
            if arena is None:
                bells.close()
            else:
                bells.keep_own_ends()
        return arena

    def close(self) -> None:
        """Closes the bells; the memory goes with the last tensor of others that lies in it."""
        self.inward.close()
        self.outward.close()
        # Whoever holds the arena may be garbage that waits to be collected for long.
        self._gradients.clear()
        del self._sums
        self._placed.clear()

    def place(
        self, numel: int, dtype: torch.dtype, wait_until_done: Callable[[], object], new_step: bool
    ) -> Slot | None:
        """The next stretch, once the buckets that used it are done; None if this one is larger than the area.

        Every member places the same buckets in the same order, so they agree on stretches without a word. A bucket that
        is done here was read by all others: its sums reached us only after they had read our gradients, and before a
        member may write new sums it has heard from us about the new bucket, so we have read the old ones.
        """
        num_bytes = numel * dtype.itemsize
        if num_bytes > self._num_bytes:
            return None
        if new_step:
            self._first = 0 if self._first else _aligned(self._num_bytes // 2)
            self._next = self._first
        start = self._next if self._next + num_bytes <= self._num_bytes else 0
        stop = start + num_bytes
        self._next = _aligned(stop)
        in_the_way = [i for i, (first, last, _) in enumerate(self._placed) if first < stop and start < last]
        for _ in range(max(in_the_way, default=-1) + 1):
            self._placed.popleft()[2]()
        self._placed.append((start, stop, wait_until_done))
        return Slot([area[start:stop].view(dtype) for area in self._gradients], self._sums[start:stop].view(dtype))


def _mapped(files: list[tuple[str, bytes]], num_bytes: int) -> list[Tensor]:
    """The files as tensors; OSError if one is missing or another file than the one that its owner meant."""
    areas = []
    for path, token in files:
        # Ranks in process namespaces of their own may have equal process numbers: the token tells memory apart.
        with open(path, "rb") as file:
            if file.read(TOKEN_BYTES) != token:
                raise FileNotFoundError(path)
        areas.append(torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8))
    return areas


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
