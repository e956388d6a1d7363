"""Pipes between the ranks of a node that say "my area is ready": a fraction of the cost of a message by socket."""

import os
import select
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fourmin.allreduce.members import Members
from lightning_fourmin.errors import LostRankError

_NUMBER = struct.Struct("=q")
LONGEST_POLL_MS = 2**31 - 1


@dataclass(frozen=True)
class Bell:
    """What a member rings when it is ready with a piece."""

    bells: "Bells"
    place: int
    number: int

    def wait(self) -> None:
        self.bells.hear(self.place, self.number)


class Bells:
    """A pipe from every member to every other; each carries the numbers of pieces, in order."""

    def __init__(self, members: Members, timeout_s: float) -> None:
        self._members, self._timeout_s = members, timeout_s
        self._hear: dict[int, int] = {}
        self._ring: dict[int, int] = {}
        self._lent: dict[int, int] = {}

    def make(self) -> None:
        """Makes the pipes to this rank; `paths` tells each other member where to open its end."""
        for place in self._members.others:
            self._hear[place], self._lent[place] = os.pipe()

    @property
    def paths(self) -> dict[int, str]:
        """By the place of the member that is to ring."""
        return {place: f"/proc/{os.getpid()}/fd/{end}" for place, end in self._lent.items()}

    def open(self, everyones_paths: Sequence[dict[int, str]]) -> None:
        """Opens this rank's end of every other member's pipe; OSError where their processes cannot be seen."""
        for place in self._members.others:
            self._ring[place] = os.open(everyones_paths[place][self._members.index], os.O_WRONLY | os.O_CLOEXEC)

    def keep_own_ends(self) -> None:
        """Once all have opened theirs: what is left is the ringer's, so that its death closes the pipe."""
        while self._lent:
            os.close(self._lent.popitem()[1])

    def ring(self, place: int, number: int) -> None:
        try:
            os.write(self._ring[place], _NUMBER.pack(number))
        except BrokenPipeError:
            raise self._gone(place) from None

    def ring_others(self, number: int) -> None:
        for place in self._members.others:
            self.ring(place, number)

    def from_each(self, places: Sequence[int], number: int) -> list[tuple[int, Bell]]:
        """The bells to wait for, each with its rank."""
        return [(self._members.ranks[place], Bell(self, place, number)) for place in places]

    def hear(self, place: int, number: int) -> None:
        """Waits until the member at `place` has rung for this piece."""
        pipe = self._hear[place]
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if not poll.poll(min(1e3 * self._timeout_s, LONGEST_POLL_MS)):
            raise LostRankError(f"rank {self._members.ranks[place]} was not ready within {self._timeout_s:g} s")
        heard = os.read(pipe, _NUMBER.size)
        if not heard:
            raise self._gone(place)
        if _NUMBER.unpack(heard) != (number,):
            raise RuntimeError(
                f"rank {self._members.ranks[place]} is at piece {_NUMBER.unpack(heard)[0]} of its gradients, this rank "
                f"at piece {number}: the ranks do not train the same module"
            )

    def close(self) -> None:
        self.keep_own_ends()
        for pipes in (self._hear, self._ring):
            while pipes:
                os.close(pipes.popitem()[1])

    def _gone(self, place: int) -> LostRankError:
        return LostRankError(f"rank {self._members.ranks[place]} is gone: its process ended, or stopped training")
