"""Who reads which positions of an epoch's order: its partition into ranks, workers and batches.

    epoch order  |            rank 0                |            rank 1                |
                 |   worker 0     |   worker 1      |   worker 0     |   worker 1      |
                 |  b0   b2   b4  |  b1   b3        |  b0   b2   b4  |  b1   b3        |

A worker reads one contiguous worker range from left to right, so that it opens few shards; the loader takes the batches
b0, b1, ... of a rank from its workers in turn. What is left of an epoch is a list of spans again, which any other
partition divides in the same way. All of this is arithmetic in the main process of each rank, without communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_fourmin.data.order import Span, Spans, cut, joined, num_positions

Remainder = Literal["drop", "wrap"]
"""What becomes of the samples that fill no step: they are dropped, or the step is filled from the epoch's start."""


@dataclass(frozen=True)
class BatchRequest:
    """The request for one batch, which the main process of a rank sends to one of its workers."""

    epoch: int
    worker_range: Spans
    """All positions that the worker reads in this epoch."""
    first: int
    """The number of positions of the worker range before the batch."""
    count: int
    """The number of positions in the batch."""


@dataclass(frozen=True)
class RankShare:
    """What one rank reads of an epoch: a range for each worker, and the batches that the loader takes from them."""

    worker_ranges: tuple[Spans, ...]
    batch_sizes: tuple[int, ...]
    """The sizes of the batches in the order in which the loader takes them, a batch of each worker in turn."""

    def requests(self, epoch: int) -> Iterator[BatchRequest]:
        """The requests for all batches, in the order in which the loader takes them."""
        taken = [0] * len(self.worker_ranges)
        for number, size in enumerate(self.batch_sizes):
            worker = number % len(self.worker_ranges)
            yield BatchRequest(epoch, self.worker_ranges[worker], taken[worker], size)
            taken[worker] += size


@dataclass(frozen=True)
class Partition:
    """The ranks, workers and batch size into which an epoch's order is divided."""

    world: int
    batch_size: int
    """Samples in a batch of one rank."""
    num_workers: int
    """Workers of each rank; 1 where the main process itself reads."""

    @property
    def global_batch(self) -> int:
        """The number of samples in the batches of all ranks together."""
        return self.world * self.batch_size

    def _range_sizes(self, batch_sizes: tuple[int, ...]) -> list[int]:
        """The number of positions that each worker of a rank reads for these batches."""
        return [sum(batch_sizes[worker :: self.num_workers]) for worker in range(self.num_workers)]

    def _rank_share(self, spans: Spans, batch_sizes: tuple[int, ...]) -> RankShare:
        return RankShare(tuple(cut(spans, self._range_sizes(batch_sizes))), batch_sizes)

    def epoch(self, num_samples: int, remainder: Remainder, num_accumulated: int = 1) -> Spans:
        """The positions of an epoch, with its end dropped or its start repeated so that it has only whole steps.

        A step has `num_accumulated` global batches.
        """
        if num_samples == 0:
            return ()
        return _filled((Span(0, num_samples),), self.global_batch * num_accumulated, remainder, num_samples)

    def rest(self, left: Spans, whole: Spans, remainder: Remainder, num_samples: int) -> Spans:
        """The positions that another partition left of an epoch, in whole global batches of this partition.

        They are never more than this partition's `whole` epoch has, because Lightning asked for the length of an epoch
        before and expects no more batches.
        """
        filled = _filled(left, self.global_batch, remainder, num_samples)
        return cut(filled, [min(num_positions(filled), num_positions(whole))])[0]

    def num_batches(self, spans: Spans) -> int:
        """The number of batches that each rank has of spans of whole global batches."""
        return num_positions(spans) // self.global_batch

    def train(self, spans: Spans, rank: int) -> RankShare:
        """A rank's share of spans of whole global batches: every rank has the same number of full batches."""
        num_batches = self.num_batches(spans)
        size = num_batches * self.batch_size
        return self._rank_share(cut(spans, [rank * size, size])[1], (self.batch_size,) * num_batches)

    def evaluation(self, num_samples: int, rank: int) -> RankShare:
        """A rank's share of all samples, each of which one rank reads once.

        Every rank has the same number of batches, because a collective after each batch would hang otherwise.
        To that end the batches of a rank differ in size by at most one sample. Batches of one sample cannot be evened
        out: with batch_size=1 some ranks may have one batch less.
        """
        size, num_larger = divmod(num_samples, self.world)
        start = rank * size + min(rank, num_larger)
        size += rank < num_larger
        num_batches = min(size, -(-num_samples // self.global_batch))
        batch_sizes = tuple((size + number) // num_batches for number in range(num_batches))
        return self._rank_share((Span(start, start + size),), batch_sizes)

    def left(self, spans: Spans, num_batches: int) -> Spans:
        """The positions that are left of spans after every rank has had `num_batches` batches of them.

        The rest of the range of the worker whose batch comes next stands first. The same partition then divides what is
        left into the very batches that would have followed, in the same order.
        """
        sizes = (self.batch_size,) * self.num_batches(spans)
        range_sizes = self._range_sizes(sizes)
        taken = self._range_sizes(sizes[:num_batches])
        worker_ranges = cut(spans, range_sizes * self.world)
        workers = [(num_batches + offset) % self.num_workers for offset in range(self.num_workers)]
        return joined(
            span
            for rank in range(self.world)
            for worker in workers
            for span in cut(
                worker_ranges[rank * self.num_workers + worker], [taken[worker], range_sizes[worker] - taken[worker]]
            )[1]
        )


def _filled(spans: Spans, size: int, remainder: Remainder, num_samples: int) -> Spans:
    """Spans in whole parts of a size: the last, incomplete part is dropped or filled from the start of the order."""
    num_whole, num_over = divmod(num_positions(spans), size)
    if remainder == "drop":
        return cut(spans, [num_whole * size])[0]
    # A part may be larger than the whole epoch, which is then repeated several times.
    laps, missing = divmod(-num_over % size, num_samples)
    return joined([*spans, *[Span(0, num_samples)] * laps, Span(0, missing)])
