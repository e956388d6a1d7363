"""`ShardDataset`: loads the batches that a loader requests, in its worker processes."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_fourmin.data.index import Split
from lightning_fourmin.data.order import EpochOrder, Span, Spans, cut
from lightning_fourmin.data.partition import BatchRequest
from lightning_fourmin.data.reader import Samples, stream_range
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.errors import ShardError

Transform = Callable[[Sample, np.random.Generator], Any]
"""Turns a sample into what is collated to batches. The generator is seeded by (seed, epoch, sample)."""
Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of values that the transform returned."""
OnError = Literal["raise", "repeat", "omit"]
"""What becomes of a damaged sample: an error, a good sample in its place, or nothing."""


class LoadedBatch(NamedTuple):
    """A batch as it travels from a worker to the main process, with the faults of the samples that it lacks."""

    batch: Any
    faults: tuple[str, ...]
    is_empty: bool = False
    """Whether none of the samples could be read, so that there is no batch."""


@dataclass(eq=False, repr=False)
class ShardDataset(Dataset[LoadedBatch | ShardError]):
    """Loads the batch of each request: reads the samples, transforms and collates them.

    The data module makes the dataset in the main process of a rank. The loader's workers get copies when they start at
    the first batch of a run: by fork, or pickled where processes are spawned. From then on each worker (without workers
    the main process itself) calls its own copy with one request after the other, and nothing is shared between copies.

    A dataset keeps the stream of its worker range open between requests. A request that continues where the one before
    ended takes its samples from that stream; any other request opens a new stream, which is right as well, only slower.
    """

    split: Split
    folder: str
    """The folder or URL of the index."""
    _: KW_ONLY
    seed: int
    """Seed of the order of the samples and of what the transform draws."""
    window: int
    """The number of samples that are shuffled with each other; 0: nothing is shuffled."""
    transform: Transform
    collate: Collate
    on_error: OnError
    _stream: Samples | None = field(init=False, default=None)
    _stream_at: tuple[int, Spans, int] | None = field(init=False, default=None)
    """The epoch, the worker range and the position in it at which the stream stands."""

    def __post_init__(self) -> None:
        self._rng = np.random.Generator(np.random.Philox(0))

    @override
    def __getitem__(self, request: BatchRequest) -> LoadedBatch | ShardError:
        try:
            return self._load(request)
        except ShardError as error:
            # Returned, not raised: torch turns an error that a worker raises into the text of a traceback.
            return error
        finally:
            # An error may keep the dataset alive until the garbage is collected, and with it the open shard.
            if self._stream is not None and self._stream_at is None:
                self._stream.close()

    def epoch_order(self, epoch: int) -> EpochOrder:
        """The order of the split's samples in an epoch."""
        return EpochOrder(tuple(shard.num_samples for shard in self.split.shards), self.seed, epoch, self.window)

    def _load(self, request: BatchRequest) -> LoadedBatch:
        epoch, worker_range, first, count = request.epoch, request.worker_range, request.first, request.count
        if self._stream is None or self._stream_at != (epoch, worker_range, first):
            self._stream = stream_range(self.split, self.folder, self.epoch_order(epoch), worker_range, first)
        # An error below leaves the stream somewhere inside the batch, where no request continues it.
        self._stream_at = None
        good: list[Any] = []
        faults: list[str] = []
        for sample in islice(self._stream, count):
            made = self._apply(sample, epoch)
            if not isinstance(made, ShardError):
                good.append(made)
            elif self.on_error == "raise":
                raise made
            else:
                faults.append(str(made))
        self._stream_at = (epoch, worker_range, first + count)
        if self.on_error == "repeat" and faults:
            good = [*islice(cycle(good or self._replacements(request)), count)]
            if not good:
                raise ShardError(f"{faults[0]} (and no other sample of the split is good)")
        if not good:
            return LoadedBatch(None, tuple(faults), is_empty=True)
        return LoadedBatch(self.collate(good), tuple(faults))

    def _replacements(self, request: BatchRequest) -> list[Any]:
        """Replacements for a batch without any good sample: the next good samples in the epoch's order.

        They are looked for in the whole order, not only in the worker range, so that every number of ranks and every
        resumed run picks the same ones. They come from a stream of their own, so the worker's stream stays where it is.
        """
        start = cut(request.worker_range, [request.first, request.count])[1][0].start
        around = (Span(start, self.split.num_samples), Span(0, start))
        order = self.epoch_order(request.epoch)
        with closing(stream_range(self.split, self.folder, order, around, 0)) as samples:
            made = (self._apply(sample, request.epoch) for sample in samples)
            return list(islice((one for one in made if not isinstance(one, ShardError)), request.count))

    def _generator(self, epoch: int, number: int) -> np.random.Generator:
        """The generator of a sample: the same object each time, set to another state, as making one is far slower."""
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
        """What the transform makes of a sample, or the error that says what is wrong with it."""
        if isinstance(sample, ShardError):
            return sample
        try:
            return self.transform(sample, self._generator(epoch, sample.number))
        except ShardError as error:
            return error
        except Exception as error:
            where = f"in the transform of sample {sample.key} of {sample.shard}"
            if self.on_error != "raise":
                return ShardError(f"{where}: {type(error).__name__}: {error}")
            error.add_note(where)
            raise
