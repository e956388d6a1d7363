"""Who reads what of an epoch: its line is dealt to ranks, workers and batches, and what is left can be dealt again.

            rank 0                   |            rank 1
  worker 0        worker 1           |  worker 0        worker 1
  b0  b2  b4      b1  b3             |  b0  b2  b4      b1  b3

Each worker reads its lane, one piece of the line, from left to right; the loader takes a batch of each worker in turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_fourmin.data.order import Stretch, Stretches, cut, joined, num_positions

Remainder = Literal["drop", "wrap"]


@dataclass(frozen=True)
class Ticket:
    """Asks a worker for one batch."""

    epoch: int
    lane: Stretches
    first: int
    """Samples of the lane before the batch."""
    count: int


@dataclass(frozen=True)
class Share:
    """What one rank reads: a lane a worker, and the sizes of the batches that are taken from the lanes in turn."""

    lanes: tuple[Stretches, ...]
    batch_sizes: tuple[int, ...]

    def tickets(self, epoch: int) -> Iterator[Ticket]:
        taken = [0] * len(self.lanes)
        for number, size in enumerate(self.batch_sizes):
            worker = number % len(self.lanes)
            yield Ticket(epoch, self.lanes[worker], taken[worker], size)
            taken[worker] += size


@dataclass(frozen=True)
class Deal:
    """Ranks, workers and batch size that a line is dealt to."""

    world: int
    batch_size: int
    num_workers: int

    @property
    def global_batch(self) -> int:
        return self.world * self.batch_size

    def _lane_sizes(self, batch_sizes: tuple[int, ...]) -> list[int]:
        return [sum(batch_sizes[worker :: self.num_workers]) for worker in range(self.num_workers)]

    def _share(self, stretches: Stretches, batch_sizes: tuple[int, ...]) -> Share:
        return Share(tuple(cut(stretches, self._lane_sizes(batch_sizes))), batch_sizes)

    def epoch(self, num_samples: int, remainder: Remainder, num_accumulated: int = 1) -> Stretches:
        """The line of an epoch, shortened or prolonged from its start to a whole number of steps.

        A step has `num_accumulated` global batches.
        """
        if num_samples == 0:
            return ()
        return _filled((Stretch(0, num_samples),), self.global_batch * num_accumulated, remainder, num_samples)

    def rest(self, left: Stretches, whole: Stretches, remainder: Remainder, num_samples: int) -> Stretches:
        """What other ranks left of an epoch, in whole global batches of these; no more than the `whole` line has."""
        filled = _filled(left, self.global_batch, remainder, num_samples)
        return cut(filled, [min(num_positions(filled), num_positions(whole))])[0]

    def num_batches(self, stretches: Stretches) -> int:
        """Batches that each rank has of a line of whole global batches."""
        return num_positions(stretches) // self.global_batch

    def train(self, stretches: Stretches, rank: int) -> Share:
        """A rank's share of a line of whole global batches: as many batches on every rank."""
        num_batches = self.num_batches(stretches)
        size = num_batches * self.batch_size
        return self._share(cut(stretches, [rank * size, size])[1], (self.batch_size,) * num_batches)

    def evaluation(self, num_samples: int, rank: int) -> Share:
        """A rank's share of all samples, each once.

        Every rank has as many batches, so that nothing waits for ever that runs once a batch. To that end the batches
        of a rank are of equal size, give or take one sample. Batches of one sample cannot be evened out: with
        batch_size=1 some ranks may have one batch less.
        """
        size, num_larger = divmod(num_samples, self.world)
        start = rank * size + min(rank, num_larger)
        size += rank < num_larger
        num_batches = min(size, -(-num_samples // self.global_batch))
        batch_sizes = tuple((size + number) // num_batches for number in range(num_batches))
        return self._share((Stretch(start, start + size),), batch_sizes)

    def left(self, stretches: Stretches, num_batches: int) -> Stretches:
        """What is left of a line after every rank has had `num_batches`.

        The lane that is next comes first: dealt again to as many ranks and workers, what is left gives the very batches
        that would have followed.
        """
        sizes = (self.batch_size,) * self.num_batches(stretches)
        lane_sizes = self._lane_sizes(sizes)
        taken = self._lane_sizes(sizes[:num_batches])
        lanes = cut(stretches, lane_sizes * self.world)
        in_turn = [(num_batches + turn) % self.num_workers for turn in range(self.num_workers)]
        return joined(
            stretch
            for rank in range(self.world)
            for worker in in_turn
            for stretch in cut(
                lanes[rank * self.num_workers + worker], [taken[worker], lane_sizes[worker] - taken[worker]]
            )[1]
        )


def _filled(stretches: Stretches, size: int, remainder: Remainder, num_samples: int) -> Stretches:
    """A whole number of parts of a size: what is over is dropped, or the part filled from the start of the line."""
    num_whole, num_over = divmod(num_positions(stretches), size)
    if remainder == "drop":
        return cut(stretches, [num_whole * size])[0]
    laps, missing = divmod(-num_over % size, num_samples)
    return joined([*stretches, *[Stretch(0, num_samples)] * laps, Stretch(0, missing)])
