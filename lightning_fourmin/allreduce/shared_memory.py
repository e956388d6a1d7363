"""Memory that the ranks of a group on one node share: gradients cross a node without passing through sockets.

    leader     [ gradients | sums ]      each member writes gradients into its own area and sums into the leader's, and
    member 1   [ gradients ]             reads all of them; a pipe from each to each signals that something is ready

The memory is anonymous: it has no name that could be left behind, and is freed with the last process that maps it.
"""

import os
import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fourmin.allreduce.process_groups import Members, gather_objects
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.files import file_in_memory

ALIGNMENT = 64
TOKEN_BYTES = 16
LONGEST_POLL_MS = 2**31 - 1
_NUMBER = struct.Struct("=q")


@dataclass(frozen=True)
class Signal:
    """A member's message that it is ready with a piece, to be waited for."""

    pipes: "ReadyPipes"
    place: int
    number: int

    def wait(self) -> None:
        """Blocks until the member has sent it."""
        self.pipes.wait_for(self.place, self.number)


class ReadyPipes:
    """A pipe from every member to every other that carries the numbers of pieces, in order: "my area is ready".

    A pipe costs a fraction of a message by socket, and closes by itself when its writer dies, so a reader that waits
    learns of that at once. There is no lock: only the thread of one stage writes, and only that of the next one reads.
    """

    def __init__(self, members: Members, timeout_s: float) -> None:
        self._members, self._timeout_s = members, timeout_s
        self._read: dict[int, int] = {}
        self._write: dict[int, int] = {}
        self._lent: dict[int, int] = {}
        """Write ends of the pipes to this rank, which stay open until their writers have opened them by path."""

    def make(self) -> None:
        """Makes the pipes to this rank; `paths` tells each other member where to open its end."""
        for place in self._members.others:
            self._read[place], self._lent[place] = os.pipe()

    @property
    def paths(self) -> dict[int, str]:
        """Where to open the write ends, by the place of the member that is to write."""
        return {place: f"/proc/{os.getpid()}/fd/{end}" for place, end in self._lent.items()}

    def open(self, everyones_paths: Sequence[dict[int, str]]) -> None:
        """Opens this rank's end of every other member's pipe; OSError where their processes cannot be seen."""
        for place in self._members.others:
            self._write[place] = os.open(everyones_paths[place][self._members.index], os.O_WRONLY | os.O_CLOEXEC)

    def keep_own_ends(self) -> None:
        """Closes the lent ends once all have opened theirs: only then does the death of a writer close its pipe."""
        while self._lent:
            os.close(self._lent.popitem()[1])

    def signal(self, place: int, number: int) -> None:
        """Tells the member at `place` that this rank is ready with a piece."""
        try:
            os.write(self._write[place], _NUMBER.pack(number))
        except BrokenPipeError:
            raise self._gone(place) from None

    def signal_others(self, number: int) -> None:
        """Tells all other members that this rank is ready with a piece."""
        for place in self._members.others:
            self.signal(place, number)

    def signals_from(self, places: Sequence[int], number: int) -> list[tuple[int, Signal]]:
        """The signals of these members for a piece, to be waited for, each with its rank."""
        return [(self._members.ranks[place], Signal(self, place, number)) for place in places]

    def wait_for(self, place: int, number: int) -> None:
        """Waits until the member at `place` is ready with this piece."""
        pipe = self._read[place]
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if not poll.poll(min(1e3 * self._timeout_s, LONGEST_POLL_MS)):
            raise LostRankError(f"rank {self._members.ranks[place]} was not ready within {self._timeout_s:g} s")
        received = os.read(pipe, _NUMBER.size)
        if not received:
            raise self._gone(place)
        if _NUMBER.unpack(received) != (number,):
            raise RuntimeError(
                f"rank {self._members.ranks[place]} is at piece {_NUMBER.unpack(received)[0]} of its gradients, this "
                f"rank at piece {number}: the ranks do not train the same module"
            )

    def close(self) -> None:
        """Closes all ends that this rank has."""
        self.keep_own_ends()
        for pipes in (self._read, self._write):
            while pipes:
                os.close(pipes.popitem()[1])

    def _gone(self, place: int) -> LostRankError:
        return LostRankError(f"rank {self._members.ranks[place]} is gone: its process ended, or stopped training")


@dataclass(frozen=True)
class Slot:
    """A stretch of shared memory in the wire's dtype: the gradients of every member, and their sums."""

    gradients: list[Tensor]
    sums: Tensor

    def narrow(self, start: int, numel: int) -> "Slot":
        """A part of the stretch."""
        return Slot([area[start : start + numel] for area in self.gradients], self.sums[start : start + numel])


class SharedArena:
    """The areas of a group's members. Every member places the same buckets, in the same order, in the same stretches.

    It saves the copies and the sockets that messages between processes of one node cost. Steps use the two halves of an
    area in turn: DDP still copies results of a step out of its half while the next step begins. And each step gets
    memory that an earlier one has touched, which matters because the first touch of a page is slow.

    The main thread opens the arena and places buckets; the threads of the stages read and write the stretches of their
    pieces; the thread of the last stage closes the arena.
    """

    def __init__(self, areas: list[Tensor], members: Members, inward: ReadyPipes, outward: ReadyPipes) -> None:
        self.members, self.inward, self.outward = members, inward, outward
        self._num_bytes = areas[0].numel() // 2
        self._gradients = [area[: self._num_bytes] for area in areas]
        self._sums = areas[0][self._num_bytes :]
        self._next = self._first = 0
        self._placed: deque[tuple[int, int, Callable[[], object]]] = deque()

    @classmethod
    def open(cls, members: Members, num_bytes: int, timeout_s: float) -> "SharedArena | None":
        """Maps the areas of all members; None on all of them if one cannot, as without a common process namespace.

        A collective call of the group. Members that failed take part to its end, so that nobody waits for them.
        """
        num_bytes = _aligned(num_bytes)
        inward, outward = ReadyPipes(members, timeout_s), ReadyPipes(members, timeout_s)
        descriptor = file_in_memory("fourmin")
        path, token = "", os.urandom(TOKEN_BYTES)
        areas: list[Tensor] = []
        try:
            with suppress(OSError):  # the path then stays empty, so no member can map the area and all use messages
                inward.make()
                outward.make()
                if descriptor is not None:
                    os.ftruncate(descriptor, 2 * num_bytes)  # takes memory only where it is written
                    os.pwrite(descriptor, token, 0)
                    path = f"/proc/{os.getpid()}/fd/{descriptor}"
            offers = gather_objects((path, token, inward.paths, outward.paths), members.group)
            try:
                areas = _mapped([offer[:2] for offer in offers], 2 * num_bytes)
                inward.open([offer[2] for offer in offers])
                outward.open([offer[3] for offer in offers])
            except (OSError, RuntimeError):
                areas = []
            mapped = gather_objects(bool(areas), members.group)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        arena = cls(areas, members, inward, outward) if all(mapped) else None
        for pipes in (inward, outward):
            if arena is None:
                pipes.close()
            else:
                pipes.keep_own_ends()
        return arena

    def close(self) -> None:
        """Closes the pipes; the memory goes with the last tensor of others that lies in it."""
        self.inward.close()
        self.outward.close()
        # What still refers to the arena may be garbage that is collected much later.
        self._gradients.clear()
        del self._sums
        self._placed.clear()

    def place(
        self, numel: int, dtype: torch.dtype, wait_until_done: Callable[[], object], new_step: bool
    ) -> Slot | None:
        """The next stretch, once the buckets that used it are done; None if this one is larger than the area.

        Every member places the same buckets in the same order, so they agree on stretches without a message. When a
        bucket is done on this rank, its stretch may be written again: the sums came only after all members had read the
        gradients of this rank. And a member writes new sums only after this rank has signalled the new bucket, which it
        does after it has read the old sums.
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
    """The files as tensors; OSError if one is missing, or is not the file that its owner meant."""
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
