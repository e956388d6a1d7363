"""The answer to "Will it help you?": what a step takes with plain DDP and with fourmin, in one sentence.

It rests on rounds in which a step without communication, with DDP and with fourmin were timed one after the other. The
interval around the ratio is that of the sign test: it assumes nothing about how times scatter, so a round that the
machine disturbed counts like any other. Rounds end as soon as the interval decides, and whoever looks often enough sees
whatever he hopes for; so each look has its share of the 5 % for being wrong, and the shares of all looks add up to it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fourmin.allreduce.algorithms import Ring
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.text import plural, readable_size

CLEAR_GAIN = 1.03
"""The speedup from which on fourmin is called faster."""
WRONG = 0.05
"""The probability that any of the looks at the rounds gives an interval without the true ratio."""
LOOKS = tuple(round(7 * 1.5**number) for number in range(20))
"""The numbers of rounds after which the interval may decide: 7, 10, 16 and so on; fewer give no interval."""


@dataclass(frozen=True)
class Interval:
    """A median, and the ends of an interval for it; without any end where the values are too few."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], wrong: float) -> "Interval":
        """The interval that misses the true median with a probability of at most `wrong`."""
        ordered, num_outside = sorted(values), 0
        # The probability that at most `num_outside` values lie on one given side of the true median, times two.
        missed = 2.0 ** (1 - len(ordered))
        while missed <= wrong:
            num_outside += 1
            missed += math.comb(len(ordered), num_outside) * 2.0 ** (1 - len(ordered))
        if num_outside == 0:
            return cls(0.0, statistics.median(ordered), math.inf)
        return cls(ordered[num_outside - 1], statistics.median(ordered), ordered[-num_outside])


@dataclass(frozen=True)
class Verdict:
    """What the rounds say; the milliseconds are medians over rounds."""

    compute_ms: float
    """A step without communication."""
    ddp_ms: float
    ours_ms: float
    num_rounds: int
    speedup: Interval
    """How many times faster than with DDP, by the ratio in each round."""
    over_compute: Interval
    """A step with fourmin as a multiple of one without communication, by the ratio in each round."""

    @classmethod
    def of(cls, compute_ms: Sequence[float], ddp_ms: Sequence[float], ours_ms: Sequence[float], look: int) -> "Verdict":
        """The verdict at look number `look`, from the milliseconds of each round."""
        wrong = WRONG * 6 / (math.pi * look) ** 2  # the sum over all looks is WRONG
        speedup = Interval.of([ddp / ours for ddp, ours in zip(ddp_ms, ours_ms, strict=True)], wrong)
        over_compute = Interval.of([ours / alone for ours, alone in zip(ours_ms, compute_ms, strict=True)], wrong)
        median = statistics.median
        return cls(median(compute_ms), median(ddp_ms), median(ours_ms), len(ddp_ms), speedup, over_compute)

    @property
    def is_noise(self) -> bool:
        """Whether fourmin gained more than the communication that was there, which no all-reduce can."""
        return self.over_compute.high < 1.0

    @property
    def is_clear(self) -> bool:
        """Whether more rounds would tell nothing new."""
        return self.speedup.high <= CLEAR_GAIN or (self.speedup.low > CLEAR_GAIN and not self.is_noise)

    def sentence(self, how: str) -> str:
        """The answer for people; `how` says in words with which settings fourmin ran."""
        times = f"{_ms(self.ddp_ms)} a step with ddp, {_ms(self.ours_ms)} with fourmin"
        rounds = f"after {plural(self.num_rounds, 'round')}"
        if math.isinf(self.speedup.high):
            range_of = f"too few rounds, {self.num_rounds}; {times}"
        else:
            range_of = f"between {self.speedup.low:.2f}x and {self.speedup.high:.2f}x {rounds}; {times}"
        exposed_ms, left_ms = (max(0.0, ms - self.compute_ms) for ms in (self.ddp_ms, self.ours_ms))
        if self.speedup.high <= CLEAR_GAIN:
            share = exposed_ms / self.ddp_ms
            answer = f"Not in speed: {range_of}; communication is {share:.0%} of a step with ddp ({how})"
        elif self.speedup.low <= CLEAR_GAIN:
            answer = f"Cannot tell: {range_of}. A larger budget_s gives more rounds, an idle machine better ones"
        elif self.is_noise:
            answer = (
                f"Cannot tell: {range_of}, but {_ms(self.compute_ms)} without communication. More than all of it "
                "cannot be saved, so this is noise: try again on an idle machine"
            )
        else:
            answer = (
                f"Yes: {self.speedup.median:.2f}x, {range_of}; of {_ms(exposed_ms)} that communication adds to a step "
                f"{_ms(left_ms)} are left ({how})"
            )
        return f"Will it help you? {answer}."


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def sentence_without_model(table: AllReduceTable) -> str:
    """The sentence if no net was given: what the table says about its largest size."""
    largest = table.rows[-1]
    best = table.choose(largest.num_bytes)
    ring_ms, best_ms = largest.milliseconds[Ring.name], largest.milliseconds[best]
    found = f"an all-reduce of {readable_size(largest.num_bytes)} takes {ring_ms:.1f} ms as a ring"
    if ring_ms / best_ms >= CLEAR_GAIN:
        found += f" and {best_ms:.1f} ms as {best}, {ring_ms / best_ms:.2f}x"
    else:
        found += ", and nothing else is faster"
    return f"Will it help you? {found}; how much of it your backward hides tells `fourmin tune model=NAME`."
