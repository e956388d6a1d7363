"""The learning rate of each step of a large-batch run: linear scaling, warm-up and decay.

    warmup_start_lr --- linear, warmup_steps ---> peak --- poly, cosine or in steps, the rest of total_steps ---> end

    peak = lr of the optimizer x global batch / base_batch        (linear scaling rule, Goyal et al. 2017)

A schedule (`PolySchedule`, `CosineSchedule`, `StepSchedule`) is what a recipe says before data and ranks are known.
When the global batch and the length of a run are known, its method `plan` makes a `RatePlan`, which has the rate of
every step and explains its arithmetic in sentences.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from lightning_fourmin.text import plural

RISKY_LR = 1.0
"""The rate from which on a run without warm-up is warned of."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples behind one step of the optimizer."""

    rank_batch: int
    """The number of samples of one rank in one backward pass."""
    world_size: int
    """The number of ranks."""
    num_accumulated: int = 1
    """The number of backward passes before each step."""

    @property
    def size(self) -> int:
        """The number of samples of one step on all ranks."""
        return self.rank_batch * self.world_size * self.num_accumulated

    def __str__(self) -> str:
        """Returns the arithmetic, such as `32 a rank x 8 ranks = 256`."""
        accumulated = f" x {self.num_accumulated} accumulated" if self.num_accumulated > 1 else ""
        return f"{self.rank_batch:,d} a rank x {plural(self.world_size, 'rank')}{accumulated} = {self.size:,d}"


@dataclass(frozen=True)
class RatePlan:
    """The learning rate of every step of one run; `Schedule.plan` makes it."""

    schedule: "Schedule"
    """The recipe that the plan follows."""
    base_lr: float
    """The rate that the optimizer was given."""
    peak_lr: float
    """The rate at the end of the warm-up, after linear scaling."""
    batch: GlobalBatch | None
    """The global batch; None where it is not known."""
    warmup_steps: int
    """The number of steps before the one that has the peak rate."""
    steps_per_epoch: float
    """The length of an epoch, infinite if the train loader does not know it."""
    total_steps: int
    """The length of the run, in steps."""

    def lr(self, step: int) -> float:
        """Returns the rate of a step, counted from 0.

        The rate rises to the peak, which step `warmup_steps` has, and falls from there. As in MLPerf's reference, the
        last step does not reach the end of the decay; one more step would.
        """
        if step < self.warmup_steps:
            start_lr = self.schedule.warmup_start_lr
            return start_lr + (self.peak_lr - start_lr) * step / self.warmup_steps
        share = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps + 1)
        return self.schedule.decayed(self.peak_lr, min(share, 1.0), step / self.steps_per_epoch)

    def in_words(self) -> list[str]:
        """Returns the arithmetic of batch, rate and steps as sentences."""
        peak = f"{self.base_lr:g}, as given"
        if self.batch is not None and self.schedule.base_batch is not None:
            fraction = f"{self.batch.size:,d} / {self.schedule.base_batch:,d}"
            peak = f"{self.base_lr:g} x {fraction} = {self.peak_lr:g} (linear scaling rule)"
        length = f"{self.total_steps:,d} steps"
        if self.steps_per_epoch < math.inf:
            num_epochs = self.total_steps / self.steps_per_epoch
            noun = "epoch" if num_epochs == 1 else "epochs"
            length = f"{num_epochs:,.4g} {noun} x {self.steps_per_epoch:,.0f} steps = {length}"
        rate = f"{self.peak_lr:g}"
        if self.warmup_steps:
            rate = f"{self.schedule.warmup_start_lr:g} to {rate} in {self.warmup_steps:,d} steps"
        too_short = 0 < self.total_steps <= self.warmup_steps
        then = "but the run ends before that" if too_short else self.schedule.decay_in_words()
        batch = [] if self.batch is None else [f"Global batch: {self.batch}."]
        return [*batch, f"Peak rate: {peak}.", f"Length: {length}.", f"Rate: {rate}, {then}."]

    def warning(self) -> str | None:
        """Returns what is likely to go wrong, as a sentence; None if nothing stands out."""
        if self.warmup_steps == 0 and self.peak_lr >= RISKY_LR:
            return (
                f"A rate of {self.peak_lr:g} from the first step on often makes a training diverge: give the schedule "
                "warmup_epochs, or a lower rate."
            )
        return None


@dataclass(frozen=True)
class Schedule(ABC):
    """What a recipe says about the learning rate; with the length of a run it becomes a `RatePlan`.

    A schedule of your own is a frozen dataclass with the methods `decayed` and `decay_in_words`.
    """

    base_batch: int | None = None
    """The global batch that the optimizer's rate is meant for: the peak rate of a run is that rate times the run's own
    global batch / `base_batch` (linear scaling rule). None: the rate is taken as it is."""
    warmup_epochs: float = 0.0
    """The length of the linear rise to the peak, in epochs."""
    warmup_steps: int | None = None
    """The length of the linear rise in steps, instead of `warmup_epochs`."""
    warmup_start_lr: float = 0.0
    """The rate of the first step."""

    def __post_init__(self) -> None:
        """Refuses values out of range and two lengths of the warm-up."""
        if self.base_batch is not None and self.base_batch < 1:
            raise ValueError(f"base_batch={self.base_batch} must be at least 1, or None to take the rate as it is")
        for name in ("warmup_epochs", "warmup_steps", "warmup_start_lr"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}={value} must be at least 0")
        if self.warmup_epochs and self.warmup_steps is not None:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} and warmup_steps={self.warmup_steps} both set the length of the "
                "warm-up: give one of them"
            )

    @abstractmethod
    def decayed(self, peak_lr: float, share: float, epoch: float) -> float:
        """Returns the rate after a share (0 to 1) of the steps that follow the warm-up, at an epoch of the run."""

    @abstractmethod
    def decay_in_words(self) -> str:
        """Returns what follows the warm-up, as the end of a sentence."""

    def plan(self, lr: float, batch: GlobalBatch | None, steps_per_epoch: float, total_steps: int) -> RatePlan:
        """Returns the rates of a run.

        Args:
            lr: The rate that the optimizer was given.
            batch: The global batch of the run; None if it is not known, which linear scaling refuses.
            steps_per_epoch: The length of an epoch, infinite if the train loader does not know it.
            total_steps: The length of the run, in steps.
        """
        if lr <= 0:
            raise ValueError(f"the optimizer's lr={lr:g} must be above 0: the schedule multiplies it")
        peak_lr = lr
        if self.base_batch is not None:
            if batch is None:
                raise ValueError(
                    f"base_batch={self.base_batch} scales the rate with the global batch, but neither the data module "
                    "nor the train loader says its batch_size: set base_batch=None and the rate of this batch"
                )
            peak_lr = lr * batch.size / self.base_batch
        num_warmup = self.warmup_steps or 0
        if self.warmup_epochs:
            if steps_per_epoch == math.inf:
                raise ValueError(
                    f"warmup_epochs={self.warmup_epochs}, but the train loader does not know how long an epoch is: "
                    "give warmup_steps instead"
                )
            num_warmup = round(self.warmup_epochs * steps_per_epoch)
        return RatePlan(self, lr, peak_lr, batch, num_warmup, steps_per_epoch, total_steps)


@dataclass(frozen=True)
class PolySchedule(Schedule):
    """A rate that falls to its end as (1 - share)^power, with the share of the steps done since the warm-up.

    Example:
        ```python
        rates = PolySchedule(warmup_steps=1560).plan(lr=10.0, batch=None, steps_per_epoch=312, total_steps=12480)
        LambdaLR(optimizer, lambda step: rates.lr(step) / rates.base_lr)
        ```
    """

    end_lr: float = 1e-4
    """The rate that the decay ends with."""
    power: float = 2.0

    @override
    def decayed(self, peak_lr: float, share: float, epoch: float) -> float:
        return self.end_lr + (peak_lr - self.end_lr) * math.pow(1 - share, self.power)

    @override
    def decay_in_words(self) -> str:
        return f"then down to {self.end_lr:g} with power {self.power:g}"


@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """A rate that falls to its end as half a wave of the cosine."""

    end_lr: float = 0.0
    """The rate that the decay ends with."""

    @override
    def decayed(self, peak_lr: float, share: float, epoch: float) -> float:
        return self.end_lr + (peak_lr - self.end_lr) * (1 + math.cos(math.pi * share)) / 2

    @override
    def decay_in_words(self) -> str:
        return f"then down to {self.end_lr:g} along a cosine"


@dataclass(frozen=True)
class StepSchedule(Schedule):
    """A rate that falls by a factor at given epochs."""

    epochs: tuple[float, ...] = (30, 60, 80)
    """The epochs at which the rate falls, counted from the beginning of the run."""
    factor: float = 0.1
    """The factor that the rate is multiplied with each time."""

    @override
    def plan(self, lr: float, batch: GlobalBatch | None, steps_per_epoch: float, total_steps: int) -> RatePlan:
        if self.epochs and steps_per_epoch == math.inf:
            raise ValueError(
                f"epochs={self.epochs}, but the train loader does not know how long an epoch is: take PolySchedule or "
                "CosineSchedule"
            )
        return super().plan(lr, batch, steps_per_epoch, total_steps)

    @override
    def decayed(self, peak_lr: float, share: float, epoch: float) -> float:
        return peak_lr * self.factor ** sum(epoch >= at for at in self.epochs)

    @override
    def decay_in_words(self) -> str:
        epochs = ", ".join(f"{epoch:g}" for epoch in self.epochs)
        return f"then x {self.factor:g} at epochs {epochs}" if epochs else "then constant"
