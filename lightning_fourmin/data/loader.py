"""Loaders around torch's DataLoader that know how far an epoch got, how long the loop waited and what was skipped."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_fourmin.data.dataset import LoadedBatch, ShardDataset
from lightning_fourmin.data.order import Span, num_positions
from lightning_fourmin.data.partition import BatchRequest, Partition, Remainder
from lightning_fourmin.data.worker_process import end_with_parent, leave_signals_to_parent
from lightning_fourmin.errors import ShardError

log = logging.getLogger(__name__)


class ShardLoader(ABC):
    """Batches of one rank, made by workers ahead of the loop.

    Not a DataLoader and without a `dataset`, so that Lightning puts no sampler of its own into it.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        partition: Partition,
        rank: int,
        *,
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
    ) -> None:
        self._dataset = dataset
        self._partition = partition
        self._rank = rank
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor if num_workers else None
        self._pin_memory = pin_memory
        self._queue: list[BatchRequest] = []
        self._loader: DataLoader[Any] | None = None
        # Under this name Lightning looks for the workers that it ends with a run; it sets the name to None then.
        self._iterator: Iterator[Any] | None = None
        self.wait_s = 0.0
        """Time that the loop has waited for batches."""
        self.num_skipped = 0
        """Damaged samples, which others stood in for or which were left out."""
        self.may_skip = dataset.on_error != "raise"
        """Whether damaged samples are skipped, instead of raised as errors."""
        self._last_fault = ""

    @abstractmethod
    def __len__(self) -> int:
        """Batches an epoch."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    def _batches(self, requests: Iterable[BatchRequest]) -> Iterator[Any]:
        for loaded in self._timed(self._start(requests)):
            if isinstance(loaded, ShardError):
                raise loaded
            for fault in loaded.faults:
                self.num_skipped += 1
                self._last_fault = fault
                log.warning("rank %d skipped a sample (%d so far): %s", self._rank, self.num_skipped, fault)
            if not loaded.is_empty:
                yield loaded.batch

    def _start(self, requests: Iterable[BatchRequest]) -> Iterator[LoadedBatch | ShardError]:
        self._queue[:] = requests
        if self._iterator is None or self._loader is None:
            self._loader = DataLoader(
                self._dataset,
                batch_size=None,
                sampler=self._queue,
                num_workers=self._num_workers,
                prefetch_factor=self._prefetch_factor,
                persistent_workers=self._num_workers > 0,
                pin_memory=self._pin_memory,
                collate_fn=_as_it_is,
                worker_init_fn=partial(_bind_to_rank, rank=self._rank),
            )
        self._iterator = iter(self._loader)
        return self._iterator

    def _timed(self, loaded_batches: Iterator[LoadedBatch | ShardError]) -> Iterator[LoadedBatch | ShardError]:
        while True:
            start = time.perf_counter()
            loaded = next(loaded_batches, None)
            self.wait_s += time.perf_counter() - start
            if loaded is None:
                return
            yield loaded


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _bind_to_rank(worker: int, rank: int) -> None:
    # For transforms that do not use the generator they are given: torch seeds workers alike on all ranks.
    pl_worker_init_function(worker, rank)
    leave_signals_to_parent()
    # A worker has copies of its rank's connections: the other ranks learn of a death when the last copy is gone.
    end_with_parent()


class EvalLoader(ShardLoader):
    """Every sample once, in the order of the index."""

    def __init__(self, dataset: ShardDataset, partition: Partition, rank: int, **kwargs: Any) -> None:
        super().__init__(dataset, partition, rank, **kwargs)
        num_samples = dataset.split.num_samples
        if num_samples == 0:
            raise ShardError("the split has no samples: choose another, or pack it again")
        if num_samples < partition.world:
            raise ShardError(
                f"the split has {num_samples} samples for {partition.world} ranks, so some would have nothing to "
                "evaluate: evaluate with fewer ranks"
            )
        self._rank_share = partition.evaluation(num_samples, rank)

    @override
    def __len__(self) -> int:
        return len(self._rank_share.batch_sizes)

    @override
    def __iter__(self) -> Iterator[Any]:
        is_empty = True
        for batch in self._batches(self._rank_share.requests(epoch=0)):
            is_empty = False
            yield batch
        if is_empty:
            # The other ranks would wait for ever for the metrics of this one.
            raise ShardError(f"{self._last_fault} (and no other sample that rank {self._rank} evaluates is good)")


class TrainLoader(ShardLoader):
    """The batches of each epoch, equally many on every rank; its state resumes an epoch on any number of ranks."""

    def __init__(
        self,
        dataset: ShardDataset,
        partition: Partition,
        rank: int,
        *,
        remainder: Remainder,
        num_accumulated: int = 1,
        epoch: int = 0,
        num_taken: int | None = None,
        is_at_end: Callable[[], bool] = lambda: False,
        **kwargs: Any,
    ) -> None:
        """`num_accumulated`: batches a step; `is_at_end`: whether Lightning goes on with an epoch that is at its end.

        `num_taken` is the number of batches after which the loop goes to the next epoch, if it does not take all.
        """
        super().__init__(dataset, partition, rank, **kwargs)
        num_samples = dataset.split.num_samples
        self._remainder = remainder
        self._whole = partition.epoch(num_samples, remainder, num_accumulated)
        self._num_batches = partition.num_batches(self._whole)
        if not self._num_batches:
            times, lower = "", "batch_size"
            if num_accumulated > 1:
                times, lower = f" x {num_accumulated} batches a step", "batch_size or accumulation"
            raise ShardError(
                f"the split has {num_samples} samples, less than the global batch of "
                f"{partition.global_batch * num_accumulated} ({partition.world} ranks x "
                f"{partition.batch_size}{times}): lower {lower}, or set remainder='wrap'"
            )
        self._knows_ranks = num_taken is not None
        """Whether a Trainer has it made."""
        self._num_taken = self._num_batches if num_taken is None else num_taken
        self._is_at_end = is_at_end
        self._begin(epoch)
        self._restored = False
        """Whether it was said where to go on, which counts more than the epoch that Lightning says next."""
        self._over = False
        """Whether Lightning, as it does with max_steps, goes on with an epoch that has nothing left."""
        self._num_ahead = 0
        """Epochs that Lightning counts more than we: with max_steps it takes one that it goes on with for done."""

    @property
    def sampler(self) -> "TrainLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, unless that is the one under way."""
        if not self._knows_ranks and dist.is_initialized() and dist.get_world_size() > 1:
            raise ShardError(
                "this loader was made outside of the Trainer, for one rank, so every rank would read all samples: give "
                "the data module itself to the Trainer"
            )
        if self._restored:
            self._restored = False
            self._over = not self._left and self._is_at_end()
            self._num_ahead = epoch - self._epoch if self._left or self._over else 0
            return
        self._over = False
        if epoch - self._num_ahead != self._epoch:
            self._begin(epoch - self._num_ahead)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._left = self._whole
        """What was left when the first batch was asked for."""
        self._num_delivered = 0
        """Batches since then."""
        self._num_before = 0
        """Batches of the epoch before then."""

    @override
    def __len__(self) -> int:
        return self._num_batches

    @override
    def __iter__(self) -> Iterator[Any]:
        # Nothing happens before the first batch is asked for: Lightning tells the epoch after it has made the iterator.
        if self._over:
            return
        if self._num_delivered or not self._left:
            self._begin(self._epoch + 1)
        for batch in self._batches(self._partition.train(self._left, self._rank).requests(self._epoch)):
            self._num_delivered += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch got: the same on every rank, whatever the workers have prepared."""
        num_batches = self._num_before + self._num_delivered
        left = self._partition.left(self._left, self._num_delivered) if num_batches < self._num_taken else ()
        return {
            "epoch": self._epoch,
            "num_batches": num_batches,
            "left": [list(span) for span in left],
            "global_batch": self._partition.global_batch,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where another loader was; ranks with another global batch divide what is left anew."""
        left = tuple(Span(*span) for span in state["left"])
        if left:
            fixed = self._identity()
            if self._num_taken != self._num_batches:
                fixed["global_batch"] = self._partition.global_batch
            for name, here in fixed.items():
                if state[name] != here:
                    raise ShardError(
                        f"the checkpoint was written after {state['num_batches']} batches of epoch {state['epoch']} "
                        f"with {name} {state[name]!r}, but this run has {here!r}: the rest of an epoch needs the same "
                        f"{name}; set it so, or resume from a checkpoint of the end of an epoch"
                    )
        self._begin(state["epoch"])
        self._left = self._partition.rest(left, self._whole, self._remainder, self._dataset.split.num_samples)
        if left and not self._left:
            raise ShardError(
                f"the {num_positions(left)} samples that are left of epoch {state['epoch']} do not fill the global "
                f"batch of {self._partition.global_batch}: lower batch_size, or resume from a checkpoint of the end of "
                "an epoch"
            )
        self._num_before = self._num_batches - self._partition.num_batches(self._left) if left else state["num_batches"]
        self._restored = True

    def _identity(self) -> dict[str, Any]:
        """What must not change within an epoch."""
        return {
            "seed": self._dataset.seed,
            "window": self._dataset.window,
            "remainder": self._remainder,
            "data": self._dataset.split.digest,
        }
