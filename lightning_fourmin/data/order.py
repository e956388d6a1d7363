"""The order of an epoch as arithmetic: which sample stands at each position.

    read order     |  shard 2  |   shard 0   | shard 1 |    the shards in random order, each from its start to its end
    windows        |  w0  |  w1  |  w2  |  w3  |  w4 |      equal pieces of the read order, each shuffled inside
    epoch order     0 1 2 3 4 5 ...                         positions, counted from left to right

The order is a pure function of (shard sizes, seed, epoch, window). It knows nothing of ranks, workers or batches, and
nobody sends or stores it: every worker computes the places of its own positions, and a checkpoint keeps only the spans
of positions that are left.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNSHUFFLED_PIECE = 1024
"""The number of samples whose places are computed at once where there are no windows."""


class Span(NamedTuple):
    """The positions of an epoch's order from `start` up to `stop`, which is not included."""

    start: int
    stop: int


Spans = tuple[Span, ...]
"""Positions in the order in which they are read. Spans may overlap: with remainder="wrap" some positions come twice."""


def num_positions(spans: Spans) -> int:
    """The number of positions in all spans together."""
    return sum(span.stop - span.start for span in spans)


def joined(spans: Iterable[Span]) -> Spans:
    """The same positions in the same order, in as few spans as possible."""
    found: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


def cut(spans: Spans, sizes: Sequence[int]) -> list[Spans]:
    """Consecutive parts of the given sizes, from the start on; positions behind the last part are left out."""
    parts: list[Spans] = []
    rest = iter(spans)
    start = stop = 0
    for size in sizes:
        part: list[Span] = []
        while size:
            if start == stop:
                start, stop = next(rest)
            taken = min(size, stop - start)
            part.append(Span(start, start + taken))
            start += taken
            size -= taken
        parts.append(tuple(part))
    return parts


def permutation(num: int, *key: int) -> NDArray[np.int64]:
    """A permutation of range(num) that depends on nothing but the key."""
    # Not `Generator.permutation`: numpy promises that the raw bits of a named generator never change, but not what it
    # makes of them, and a checkpoint in mid-epoch must survive an upgrade of numpy.
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(num)
    return np.argsort(bits, kind="stable")


class Place(NamedTuple):
    """Where a sample lies in the shards."""

    shard: int
    """Number of its shard in the index."""
    in_shard: int
    """The number of samples before it in that shard."""
    number: int
    """The number of samples before it in the index, over all shards. It identifies the sample in every epoch."""
    read_order: int
    """The number of samples before it in the epoch's read order, in which a worker reads shards from end to end."""


@dataclass(frozen=True)
class EpochOrder:
    """The order of all samples of one epoch."""

    shard_sizes: tuple[int, ...]
    """Number of samples in each shard, in the order of the index."""
    seed: int
    epoch: int
    window: int
    """Number of samples that are shuffled with each other. 0: nothing is shuffled, the order is that of the index."""

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        return sum(self.shard_sizes)

    @cached_property
    def _shards(self) -> NDArray[np.int64]:
        """The numbers of the shards in read order."""
        if self.window == 0:
            return np.arange(len(self.shard_sizes))
        return permutation(len(self.shard_sizes), self.seed, self.epoch, 0)

    @cached_property
    def _stops(self) -> NDArray[np.int64]:
        """The position in the read order at which each of `_shards` ends."""
        return np.cumsum(np.asarray(self.shard_sizes, dtype=np.int64)[self._shards])

    @cached_property
    def _first_numbers(self) -> NDArray[np.int64]:
        """The number of the first sample of each shard, in the order of the index."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.shard_sizes, dtype=np.int64))[:-1]])

    def by_window(self, spans: Spans) -> Iterator[Span]:
        """The spans, cut where a window ends; where there are no windows, cut into pieces of a moderate size."""
        window = self.window or UNSHUFFLED_PIECE
        for start, stop in spans:
            while start < stop:
                end = min(stop, (start // window + 1) * window)
                yield Span(start, end)
                start = end

    def places(self, span: Span) -> list[Place]:
        """The place of each position of a span, which must lie inside one window."""
        positions = np.arange(span.start, span.stop)
        if self.window:
            number = span.start // self.window
            first = number * self.window
            size = min(self.window, self.num_samples - first)
            # From here on these are positions in the read order.
            positions = first + permutation(size, self.seed, self.epoch, 1, number)[positions - first]
        slots = np.searchsorted(self._stops, positions, side="right")
        shards = self._shards[slots]
        in_shard = positions - self._stops[slots] + np.asarray(self.shard_sizes, dtype=np.int64)[shards]
        numbers = self._first_numbers[shards] + in_shard
        columns = (shards.tolist(), in_shard.tolist(), numbers.tolist(), positions.tolist())
        return [Place(*place) for place in zip(*columns, strict=True)]
