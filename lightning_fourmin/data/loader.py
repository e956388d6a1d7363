"""Loaders of one rank's batches, which know how far an epoch got, how long the loop waited and what was skipped.

Everything here runs in the main process of a rank, in its main thread, except `_start_worker`. What worker processes do
is in `dataset.py`.
"""

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
    """Batches of one rank, loaded by worker processes ahead of the loop.

    The main process sends each worker the requests for its batches (`RankShare.requests`), and torch's DataLoader does
    the transport: its sampler is the list of requests, and it goes through the workers in turn, as the requests are
    numbered. The workers start when the first batch is asked for, when the main process already has other threads and
    connections, and stay until Lightning ends the run. Without workers the main process loads each batch when it is
    asked for.

    The class is no DataLoader itself and has no attribute `dataset`, so that Lightning leaves its sampling alone.
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
        """Starts no worker yet.

        Args:
            dataset: what loads the batches.
            partition: the ranks, workers and batch size of this run.
            rank: the rank whose batches these are.
            num_workers: number of worker processes; 0: the main process loads, and the partition has one worker.
            prefetch_factor: number of batches that each worker prepares ahead.
            pin_memory: whether batches are put into pinned memory, for faster copies to a GPU.
        """
        self._dataset = dataset
        self._partition = partition
        self._rank = rank
        self._requests: list[BatchRequest] = []
        """The requests of the epoch: always the same list, which the DataLoader reads again for each epoch."""
        self._make_loader: Callable[[], DataLoader[Any]] = partial(
            DataLoader,
            dataset,
            batch_size=None,
            sampler=self._requests,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_start_worker, rank=rank),
        )
        # Lightning looks for this name when a run ends: it ends the workers of the iterator and sets the name to None.
        self._iterator: Iterator[Any] | None = None
        self.wait_s = 0.0
        """Seconds that the loop has waited for batches so far."""
        self.num_skipped = 0
        """The number of damaged samples so far, which others replaced or which were left out."""
        self.may_skip = dataset.on_error != "raise"
        """Whether damaged samples are skipped. Otherwise they raise errors."""
        self._last_fault = ""

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches in an epoch."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch."""

    def _batches(self, requests: Iterable[BatchRequest]) -> Iterator[Any]:
        """Sends the requests and yields the batches, in the same order."""
        self._requests[:] = requests
        if self._iterator is None:
            # A DataLoader cannot be used again after its workers were ended.
            self._loader = self._make_loader()
        # With persistent workers this is the same iterator each time, at its start again. Batches of an epoch that was
        # given up, which the workers have prepared, are dropped.
        loaded_batches = self._iterator = iter(self._loader)
        while True:
            start = time.perf_counter()
            loaded: LoadedBatch | ShardError | None = next(loaded_batches, None)
            self.wait_s += time.perf_counter() - start
            if loaded is None:
                return
            if isinstance(loaded, ShardError):
                raise loaded
            for fault in loaded.faults:
                self.num_skipped += 1
                self._last_fault = fault
                log.warning("rank %d skipped a sample (%d so far): %s", self._rank, self.num_skipped, fault)
            if not loaded.is_empty:
                yield loaded.batch


def _as_it_is(loaded: Any) -> Any:
    """What the dataset gives is a batch already. Without this function torch would make tensors of its parts."""
    return loaded


def _start_worker(worker: int, rank: int) -> None:
    """What a worker process runs before it loads a batch, whether it was forked or spawned."""
    # Torch seeds workers alike on all ranks, which matters to transforms that do not use the generator they are given.
    pl_worker_init_function(worker, rank)
    leave_signals_to_parent()
    # A forked worker has copies of its rank's connections, and the other ranks learn of the rank's death only when the
    # last copy is closed. So it must not outlive its rank.
    end_with_parent()


class EvalLoader(ShardLoader):
    """The batches of an evaluation: every sample once, in the order of the index."""

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
            # Without an error the other ranks would hang, waiting for the metrics of this one.
            raise ShardError(f"{self._last_fault} (and no other sample that rank {self._rank} evaluates is good)")


class TrainLoader(ShardLoader):
    """The batches of each epoch, as many on every rank, and the state that resumes an epoch on any number of ranks.

    The loader counts epochs by itself. An iterator that is asked for its first batch continues with what is left of the
    epoch; if batches of it were taken before, or nothing is left, the iterator begins the next epoch instead.

    Lightning's fit loop (2.6) makes these calls, in this order:

    1. `load_state_dict` in a resumed run: by the data module when it makes the loader, and in most cases by Lightning
       once more, with the same state.
    2. `iter`, before Lightning says which epoch comes. So an iterator does nothing until its first batch is asked for.
    3. `sampler.set_epoch`, before each epoch. A resumed loader ignores it, because Lightning may be one epoch ahead for
       the rest of the run: it counts an epoch that `max_steps` ended in the middle as done, but resumes in it.
    4. `iter` again, unless it is the first epoch of all or a resumed one. Then `next` for each batch.
    5. `state_dict` for each checkpoint, after any batch or at the end of an epoch.

    A run that was saved at the very end of an epoch may resume in that epoch. If no validation ran then, Lightning asks
    for a batch before it sees that the epoch is over. `is_at_end` tells that case, and the iterator ends at once.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        partition: Partition,
        rank: int,
        *,
        remainder: Remainder,
        num_accumulated: int = 1,
        epoch: int = 0,
        max_batches: int | None = None,
        is_at_end: Callable[[], bool] = lambda: False,
        **kwargs: Any,
    ) -> None:
        """Raises `ShardError` if the split does not fill one step.

        Args:
            dataset: see `ShardLoader`.
            partition: see `ShardLoader`.
            rank: see `ShardLoader`.
            remainder: what becomes of samples that fill no step.
            num_accumulated: batches in a step.
            epoch: the first epoch.
            max_batches: the number of batches after which the Trainer ends an epoch; None: the loader was made without
                a Trainer.
            is_at_end: whether Lightning has resumed in an epoch of which it had seen all batches.
            **kwargs: the other arguments of `ShardLoader`.
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
        self._is_in_trainer = max_batches is not None
        self._max_batches = self._num_batches if max_batches is None else max_batches
        self._is_at_end = is_at_end
        self._is_resumed = False
        self._begin(epoch)

    @property
    def sampler(self) -> "TrainLoader":
        """The loader itself: Lightning calls `set_epoch` of what it finds under this name."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, unless the loader is in that epoch or was resumed."""
        if not self._is_in_trainer and dist.is_initialized() and dist.get_world_size() > 1:
            raise ShardError(
                "this loader was made outside of the Trainer, for one rank, so every rank would read all samples: give "
                "the data module itself to the Trainer"
            )
        if not self._is_resumed and epoch != self._epoch:
            self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._left = self._whole
        """The positions that were left of the epoch when this loader began or resumed it."""
        self._num_before = 0
        """The number of batches of the epoch that came before those positions."""
        self._num_taken = 0
        """The number of batches that were taken from them."""

    @override
    def __len__(self) -> int:
        return self._num_batches

    @override
    def __iter__(self) -> Iterator[Any]:
        if not self._left and self._is_at_end():
            return
        if self._num_taken or not self._left:
            self._begin(self._epoch + 1)
        for batch in self._batches(self._partition.train(self._left, self._rank).requests(self._epoch)):
            self._num_taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch got. It is the same on every rank, and what workers have prepared does not count."""
        num_batches = self._num_before + self._num_taken
        left = self._partition.left(self._left, self._num_taken) if num_batches < self._max_batches else ()
        return {
            "epoch": self._epoch,
            "num_batches": num_batches,
            "left": [list(span) for span in left],
            "global_batch": self._partition.global_batch,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where another loader was. Ranks with another global batch divide what is left among themselves.

        Raises `ShardError` if the rest of the epoch would not be the same samples, or would fill no batch.
        """
        left = tuple(Span(*span) for span in state["left"])
        if left:
            fixed = self._identity()
            if self._max_batches != self._num_batches:
                # The limit is a number of batches. Batches of another size would reach it at another sample.
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
        # Counted from the end, since the epoch ends for Lightning when the count is the length of the loader.
        self._num_before = self._num_batches - self._partition.num_batches(self._left) if left else state["num_batches"]
        self._is_resumed = True

    def _identity(self) -> dict[str, Any]:
        """What must be the same in a run that resumes in the middle of an epoch."""
        return {
            "seed": self._dataset.seed,
            "window": self._dataset.window,
            "remainder": self._remainder,
            "data": self._dataset.split.digest,
        }
