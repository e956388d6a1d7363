"""Medians with 95 % intervals, for times and for ratios of times measured in pairs."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds 95 % of its bootstrap resamples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def meets(self, goal: float) -> bool:
        """A goal is missed only if the whole interval lies below it."""
        return self.high >= goal


def estimate(values: Sequence[float]) -> Estimate:
    resampling = random.Random(0)
    medians = sorted(statistics.median(resampling.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    low, high = medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]
    return Estimate(statistics.median(values), low, high)


def paired_ratio(baseline: Sequence[float], ours: Sequence[float]) -> Estimate:
    """How many times faster `ours` is, from rounds in which both were measured one after the other."""
    return estimate([b / o for b, o in zip(baseline, ours, strict=True)])
