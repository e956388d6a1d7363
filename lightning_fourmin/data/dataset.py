"""What a loader's worker does: turns tickets into batches."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_fourmin.data.index import Split
from lightning_fourmin.data.order import Line, Stretch, Stretches, cut
from lightning_fourmin.data.partition import Ticket
from lightning_fourmin.data.reader import stream_lane
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.errors import ShardError

Transform = Callable[[Sample, np.random.Generator], Any]
"""Makes of a sample what is collated to batches. The generator is seeded by (seed, epoch, sample)."""
Collate = Callable[[list[Any]], Any]
OnError = Literal["raise", "repeat", "omit"]
"""What becomes of a damaged sample: an error, a good one in its place, or nothing."""


class Delivery(NamedTuple):
    """A batch, and the faults of samples that are not in it."""

    batch: Any
    faults: tuple[str, ...]
    is_empty: bool = False
    """Whether there is no batch, for want of samples."""


class ShardDataset(Dataset[Delivery | ShardError]):
    """Reads the batch of each ticket; tickets that follow each other in a lane continue its stream."""

    def __init__(
        self,
        split: Split,
        folder: str,
        *,
        seed: int,
        window: int,
        transform: Transform,
        collate: Collate,
        on_error: OnError,
    ) -> None:
        self.split = split
        self._folder = folder
        self.seed = seed
        self.window = window
        self._transform = transform
        self._collate = collate
        self._on_error = on_error
        self._stream: Iterator[Sample | ShardError] = iter(())
        self._expected: tuple[int, Stretches, int] | None = None
        """Epoch, lane and place in it that the stream stands at."""
        self._rng = np.random.Generator(np.random.Philox(0))

    @override
    def __getitem__(self, ticket: Ticket) -> Delivery | ShardError:
        try:
            return self._deliver(ticket)
        except ShardError as error:
            # Raised here it would reach the main process as the text of a traceback.
            return error

    def line(self, epoch: int) -> Line:
        return Line(tuple(shard.num_samples for shard in self.split.shards), self.seed, epoch, self.window)

    def _deliver(self, ticket: Ticket) -> Delivery:
        if self._expected != (ticket.epoch, ticket.lane, ticket.first):
            self._stream = stream_lane(self.split, self._folder, self.line(ticket.epoch), ticket.lane, ticket.first)
        self._expected = None
        good: list[Any] = []
        faults: list[str] = []
        for sample in islice(self._stream, ticket.count):
            made = self._apply(sample, ticket.epoch)
            if not isinstance(made, ShardError):
                good.append(made)
            elif self._on_error == "raise":
                raise made
            else:
                faults.append(str(made))
        self._expected = (ticket.epoch, ticket.lane, ticket.first + ticket.count)
        if self._on_error == "repeat" and faults:
            good = [*islice(cycle(good or self._following(ticket)), ticket.count)]
            if not good:
                raise ShardError(f"{faults[0]} (and no other sample of the split is good)")
        if not good:
            return Delivery(None, tuple(faults), is_empty=True)
        return Delivery(self._collate(good), tuple(faults))

    def _following(self, ticket: Ticket) -> list[Any]:
        """The good samples that come next in the line, whoever's they are: the same ones on any ranks, and resumed."""
        line = self.line(ticket.epoch)
        start = cut(ticket.lane, [ticket.first, ticket.count])[1][0].start
        around = (Stretch(start, self.split.num_samples), Stretch(0, start))
        with closing(stream_lane(self.split, self._folder, line, around, 0)) as samples:
            made = (self._apply(sample, ticket.epoch) for sample in samples)
            return list(islice((one for one in made if not isinstance(one, ShardError)), ticket.count))

    def _generator(self, epoch: int, number: int) -> np.random.Generator:
        """As if made for the sample; making one takes many times longer than setting the state of another."""
        self._rng.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {"key": (self.seed, epoch), "counter": (0, 0, 0, number)},
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._rng

    def _apply(self, sample: Sample | ShardError, epoch: int) -> Any:
        """What the transform makes of a sample, or what is wrong with it."""
        if isinstance(sample, ShardError):
            return sample
        try:
            return self._transform(sample, self._generator(epoch, sample.number))
        except ShardError as error:
            return error
        except Exception as error:
            where = f"in the transform of sample {sample.key} of {sample.shard}"
            if self._on_error != "raise":
                return ShardError(f"{where}: {type(error).__name__}: {error}")
            error.add_note(where)
            raise
