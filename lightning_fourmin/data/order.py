"""The order of an epoch as arithmetic: one line of samples, and stretches of it.

shards, in the epoch's order   |  shard 2  |   shard 0   | shard 1 |
windows, each shuffled inside  |  w0  |  w1  |  w2  |  w3  |  w4 |
the line                       0 1 2 3 4 5 ...
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNSHUFFLED_PIECE = 1024


class Stretch(NamedTuple):
    """Positions `start` to `stop` (not included) of an epoch's line."""

    start: int
    stop: int


Stretches = tuple[Stretch, ...]


def num_positions(stretches: Stretches) -> int:
    return sum(stretch.stop - stretch.start for stretch in stretches)


def joined(stretches: Iterable[Stretch]) -> Stretches:
    """The same positions in the same order in as few stretches as possible."""
    found: list[Stretch] = []
    for stretch in stretches:
        if stretch.start == stretch.stop:
            continue
        if found and found[-1].stop == stretch.start:
            found[-1] = Stretch(found[-1].start, stretch.stop)
        else:
            found.append(stretch)
    return tuple(found)


def cut(stretches: Stretches, sizes: Sequence[int]) -> list[Stretches]:
    """Consecutive parts of the given sizes; what comes after them is left out."""
    parts: list[Stretches] = []
    rest = iter(stretches)
    start = stop = 0
    for size in sizes:
        part: list[Stretch] = []
        while size:
            if start == stop:
                start, stop = next(rest)
            taken = min(size, stop - start)
            part.append(Stretch(start, start + taken))
            start += taken
            size -= taken
        parts.append(tuple(part))
    return parts


def permutation(num: int, *key: int) -> NDArray[np.int64]:
    """A permutation of range(num) that depends on the key alone.

    Raw bits of a named generator are sorted: numpy promises that those never change, but not what it makes of them.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(num)
    return np.argsort(bits, kind="stable")


class Place(NamedTuple):
    """Where a sample lies."""

    shard: int
    position: int
    """Samples of the shard before it."""
    number: int
    """Samples of all shards before it, in the order of the index: its identity."""
    turn: int
    """Samples before it if the shards were read from end to end in the epoch's order."""


@dataclass(frozen=True)
class Line:
    """The samples of one epoch in order."""

    shard_sizes: tuple[int, ...]
    """Samples of each shard."""
    seed: int
    epoch: int
    window: int
    """Samples that are shuffled with each other; 0: the order of the index, not shuffled at all."""

    @property
    def num_samples(self) -> int:
        return sum(self.shard_sizes)

    @cached_property
    def _shards(self) -> NDArray[np.int64]:
        if self.window == 0:
            return np.arange(len(self.shard_sizes))
        return permutation(len(self.shard_sizes), self.seed, self.epoch, 0)

    @cached_property
    def _stops(self) -> NDArray[np.int64]:
        """Where each shard ends when they stand in the epoch's order."""
        return np.cumsum(np.asarray(self.shard_sizes, dtype=np.int64)[self._shards])

    @cached_property
    def _first_numbers(self) -> NDArray[np.int64]:
        """Samples in the shards before each one, in the order of the index."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.shard_sizes, dtype=np.int64))[:-1]])

    def by_window(self, stretches: Stretches) -> Iterator[Stretch]:
        """The stretches, cut where windows meet; in pieces of a moderate size if there are none."""
        window = self.window or UNSHUFFLED_PIECE
        for start, stop in stretches:
            while start < stop:
                end = min(stop, (start // window + 1) * window)
                yield Stretch(start, end)
                start = end

    def places(self, stretch: Stretch) -> list[Place]:
        """Where the samples of a stretch inside one window lie, in the order of the line."""
        positions = np.arange(stretch.start, stretch.stop)
        if self.window:
            number = stretch.start // self.window
            first = number * self.window
            size = min(self.window, self.num_samples - first)
            positions = first + permutation(size, self.seed, self.epoch, 1, number)[positions - first]
        slots = np.searchsorted(self._stops, positions, side="right")
        shards = self._shards[slots]
        in_shard = positions - self._stops[slots] + np.asarray(self.shard_sizes, dtype=np.int64)[shards]
        numbers = self._first_numbers[shards] + in_shard
        columns = (shards.tolist(), in_shard.tolist(), numbers.tolist(), positions.tolist())
        return [Place(*place) for place in zip(*columns, strict=True)]
