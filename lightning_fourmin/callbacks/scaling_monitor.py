"""Logs how training scales: T = S * N * e, what communication costs a step, and which rank the others wait for.

a step of one rank   |.. forward ..|.. backward ..|wait|. optimizer .|      step_s, from step's end to step's end
buckets in flight                     [=====][========]                     busy_s
the rank cannot compute                           =====                     exposed_s

T = samples of all ranks / step_s    e = 1 - exposed_s / step_s    S = T / (N * e), the speed of a rank without waits
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_fourmin._lightning import ASK_BEFORE_BATCH
from lightning_fourmin.allreduce.measure import Communication, Meter, TakenTimes
from lightning_fourmin.callbacks.logged_steps import is_logged_step
from lightning_fourmin.strategy import FourMinStrategy

MAX_STEPS = 10_000
"""The summary is about the last steps, and at most about this many."""


@dataclass(frozen=True, kw_only=True)
class ScalingSummary:
    """Throughput T = S * N * e of all ranks, from medians over steps. A field is None where it is not known."""

    S: float | None = None
    """Samples a second of one rank while it does not wait for others."""
    N: int
    """The number of ranks."""
    e: float | None = None
    """Scaling efficiency: the share of a step in which a rank does not wait for others, mean over ranks."""
    e_low: float | None = None
    e_high: float | None = None
    """The share of a step in a quarter of all steps is at most `e_low`, and in another quarter at least `e_high`."""
    T: float
    """Samples a second of all ranks."""
    step_ms: float
    """The time from the end of one optimizer step to the end of the next."""
    comm_ms: float | None = None
    """The time of a step in which gradients are in flight."""
    exposed_ms: float | None = None
    """The time of a step in which a rank waits for others or for gradients, and cannot compute: (1 - e) * step_ms."""
    bus_mb_per_s: float | None = None
    """2 (N - 1) / N times the bytes of the gradients on the wire, by `comm_ms`: comparable between numbers of ranks."""
    slowest_rank: int | None = None
    """The rank that computes longest."""
    slowest_wait_ms: float | None = None
    """The time by which that rank computes longer than the median of the others."""


class _Step(NamedTuple):
    """A training step as one rank saw it, or the medians of many; e and busy_s are NaN if they are unknown."""

    num_samples: float
    step_s: float
    busy_s: float
    num_bytes: float
    e: float
    """The share of the step in which the rank did not wait."""
    e_low: float = math.nan
    e_high: float = math.nan
    """The quartiles of e where the others are medians."""

    @property
    def computing_s(self) -> float:
        return self.e * self.step_s


class ScalingMonitor(Callback):
    """Logs the fields of `ScalingSummary` as `fourmin/<field>` to all loggers, every `log_every_n_steps` steps.

    S, e and T are in the progress bar, too. Values are medians of the steps since they were last logged. After a fit,
    `summary` has the medians of the run, in the process that trained: strategies that spawn send no callbacks back.

    A step lasts from the end of one optimizer step to the end of the next, however many backward passes that takes; the
    first step of an epoch begins with the epoch, and validation does not count. A rank waits while the last bucket of a
    backward pass is in flight, while the engine keeps the main thread busy, in `self.log(sync_dist=True)`, and in the
    broadcast with which Lightning starts a step.

    Sending takes cores, memory and caches from computing, which is no wait: it lowers S rather than e. A run on one
    rank has the S of a rank that sends nothing.

    Only the `fourmin` strategy knows when gradients are in flight. With other strategies on several ranks N, T and the
    step time are logged. On one rank e is 1.

    All methods run in the main thread. Ranks exchange their times only when they log, in a collective. So all ranks
    have to log the same steps: the choice depends on nothing that ranks may see at different times.
    """

    def __init__(self) -> None:
        self.summary: ScalingSummary | None = None
        """The figures of the last fit."""
        self._meter: Meter | None = None
        self._unresolved: list[tuple[int, float, TakenTimes | None]] = []
        """The steps that were not logged yet: samples, seconds and times of buckets. On CUDA the times are events that
        the device may not have reached."""
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._num_samples = 0
        """The number of samples of the current step up to now."""
        self._start_s = self._paused_s = math.nan
        """The moments when the current step and the last validation began."""
        self._global_step = 0
        """The Trainer's `global_step` when the current step began."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.summary = None
        self._unresolved, self._num_samples, self._global_step = [], 0, trainer.global_step
        self._steps.clear()
        strategy = trainer.strategy
        self._meter = strategy.measure_communication() if isinstance(strategy, FourMinStrategy) else None
        if self._meter is not None:
            loop = trainer.fit_loop.epoch_loop
            vars(loop)[ASK_BEFORE_BATCH] = _timed(getattr(loop, ASK_BEFORE_BATCH), self._meter)
        # In a run that resumes in the middle of an epoch Lightning does not call `on_train_epoch_start`.
        self._begin_step()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_step()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused_s = time.perf_counter()
        if self._meter is not None:
            self._meter.paused = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.paused = False
        if self._num_samples:
            # Validation came while gradients accumulate: the time of the step before validation counts.
            self._start_s += time.perf_counter() - self._paused_s
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        self._start_s = time.perf_counter()
        if self._meter is not None:
            self._meter.take()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_samples += _batch_size(batch)
        if trainer.global_step != self._global_step:
            self._end_step(trainer)
        # While gradients accumulate after a logged step there is nothing new to log.
        if not is_logged_step(trainer, pl_module) or not self._unresolved:
            return
        for name, value in asdict(self._summarize(trainer, self._resolve(trainer))).items():
            if value is not None:
                pl_module.log(f"fourmin/{name}", float(value), batch_size=1)
                if name in ("S", "e", "T"):
                    pl_module.log(name, float(value), prog_bar=True, logger=False, batch_size=1)

    def _end_step(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        taken = None if self._meter is None else self._meter.take()
        self._unresolved.append((self._num_samples, now - self._start_s, taken))
        self._start_s, self._num_samples, self._global_step = now, 0, trainer.global_step
        if len(self._unresolved) >= MAX_STEPS:
            self._resolve(trainer)

    def _resolve(self, trainer: Trainer) -> list[_Step]:
        """Returns the steps since the last call; waits for the device."""
        unmeasured_s = 0.0 if trainer.world_size == 1 else math.nan
        steps = []
        for num_samples, step_s, taken in self._unresolved:
            communication = Communication(unmeasured_s, unmeasured_s, 0) if taken is None else taken.communication()
            exposed_s, busy_s, num_bytes = communication
            steps.append(_Step(num_samples, step_s, busy_s, num_bytes, 1 - exposed_s / step_s))
        self._unresolved = []
        self._steps.extend(steps)
        return steps

    def _summarize(self, trainer: Trainer, steps: Sequence[_Step]) -> ScalingSummary:
        """Computes the summary of all ranks from the medians of each. The call is a collective of all ranks."""
        e_low, e_high = np.quantile([step.e for step in steps], (0.25, 0.75)).tolist()
        *medians, _, _ = (statistics.median(values) for values in zip(*steps, strict=True))
        mine = torch.tensor([*medians, e_low, e_high], device=trainer.strategy.root_device)
        everyones = [mine]
        if trainer.world_size > 1:
            everyones = [torch.empty_like(mine) for _ in range(trainer.world_size)]
            dist.all_gather(everyones, mine)
        return summarize([_Step(*values.tolist()) for values in everyones])

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)
        self._resolve(trainer)
        if self._steps:
            self.summary = self._summarize(trainer, self._steps)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        vars(trainer.fit_loop.epoch_loop).pop(ASK_BEFORE_BATCH, None)
        if self._meter is not None:
            self._meter.paused = False
        self._meter = None


def summarize(everyones: Sequence[_Step]) -> ScalingSummary:
    """Combines the steps that the ranks saw, which are in the order of ranks."""
    num_ranks = len(everyones)
    step_s = statistics.fmean(step.step_s for step in everyones)
    samples_a_s = sum(step.num_samples for step in everyones) / step_s
    e, e_low, e_high = (
        statistics.fmean(getattr(step, name) for step in everyones) for name in ("e", "e_low", "e_high")
    )
    if math.isnan(e):
        return ScalingSummary(N=num_ranks, T=samples_a_s, step_ms=1e3 * step_s)
    computing_s = [step.computing_s for step in everyones]
    busy_s = statistics.fmean(step.busy_s for step in everyones)
    bus_bytes = 2 * (num_ranks - 1) / num_ranks * everyones[0].num_bytes
    slowest = max(range(num_ranks), key=lambda rank: computing_s[rank])
    others = [s for rank, s in enumerate(computing_s) if rank != slowest]
    return ScalingSummary(
        S=samples_a_s / num_ranks / e if e else math.inf,
        N=num_ranks,
        e=e,
        e_low=e_low,
        e_high=e_high,
        T=samples_a_s,
        step_ms=1e3 * step_s,
        comm_ms=1e3 * busy_s,
        exposed_ms=1e3 * (1 - e) * step_s,
        bus_mb_per_s=1e-6 * bus_bytes / busy_s if busy_s else 0.0,
        slowest_rank=slowest,
        slowest_wait_ms=1e3 * (computing_s[slowest] - statistics.median(others)) if others else 0.0,
    )


def _batch_size(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError):
        raise ValueError(
            f"ScalingMonitor cannot tell how many samples a batch of type {type(batch).__name__} has: make it a "
            "tensor, or a collection that begins with one whose first dimension is the batch; or drop the callback"
        ) from None


def _timed(work: Callable[[], None], meter: Meter) -> Callable[[], None]:
    def timed() -> None:
        with meter.waiting():
            work()

    return timed
