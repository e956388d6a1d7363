"""What a loader's worker does: turns tickets into batches."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_fourmin.data.deal import Ticket
from lightning_fourmin.data.index import Split
from lightning_fourmin.data.order import Line, Stretches
from lightning_fourmin.data.reader import stream_lane
from lightning_fourmin.data.sample import Sample, ShardError

Transform = Callable[[Sample, np.random.Generator], Any]
"""Makes of a sample what is collated to batches. The generator is seeded by (seed, epoch, sample)."""
Collate = Callable[[list[Any]], Any]
OnError = Literal["raise", "skip"]


class Delivery(NamedTuple):
    """A batch, and the faults of samples that others stand in for."""

    batch: Any
    faults: tuple[str, ...]


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
        self._good: Any = None
        """What the last good sample became."""

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
            self._good = None
        self._expected = None
        results: list[Any] = []
        faults: list[str] = []
        for _ in range(ticket.count):
            try:
                self._good = self._apply(next(self._stream), ticket.epoch)
            except ShardError as error:
                if self._on_error == "raise":
                    raise
                faults.append(str(error))
            results.append(self._good)
        self._expected = (ticket.epoch, ticket.lane, ticket.first + ticket.count)
        if self._good is None:
            raise ShardError(f"{faults[0]} (and no sample of its batch is good, so none can stand in)")
        return Delivery(self._collate([self._good if result is None else result for result in results]), tuple(faults))

    def _apply(self, sample: Sample | ShardError, epoch: int) -> Any:
        if isinstance(sample, ShardError):
            raise sample
        try:
            return self._transform(sample, np.random.default_rng((self.seed, epoch, sample.number)))
        except ShardError:
            raise
        except Exception as error:
            where = f"in the transform of sample {sample.key} of {sample.shard}"
            if self._on_error == "skip":
                raise ShardError(f"{where}: {type(error).__name__}: {error}") from error
            error.add_note(where)
            raise
