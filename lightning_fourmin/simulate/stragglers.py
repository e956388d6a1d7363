"""Slow ranks: every step waits for the slowest rank, or with b backup workers for the (N-b)th of N ranks.

One random number a step stands for all ranks: of N uniform random numbers the (N-b)th smallest is Beta(N-b, b+1)
distributed, and the quantile of that number is the pace of the rank. So a step of 2048 ranks costs as much to simulate
as one of two.
"""

import random
import statistics
from dataclasses import dataclass, replace

from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.layer_profile import Profile
from lightning_fourmin.simulate.step import CommCosts, Step, simulate

NUM_STEPS = 25
"""Steps that the mean is taken over."""


@dataclass(frozen=True)
class Stragglers:
    """How the compute time of ranks differs from that of the profile; each step draws anew who is slow."""

    jitter: float = 0.0
    """Standard deviation of a rank's compute time, as a share of it."""
    probability: float = 0.0
    """The probability that a rank is slow in a step."""
    slowdown: float = 1.0
    """How many times longer a slow rank computes."""
    num_backups: int = 0
    """The number of ranks whose gradients are dropped in each step because they come last (Chen et al. 2016)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.jitter >= 0 and 0 <= self.probability <= 1 and self.slowdown >= 1 and self.num_backups >= 0):
            raise PlanError(
                f"stragglers: jitter={self.jitter} and num_backups={self.num_backups} must be 0 or more, "
                f"probability={self.probability} between 0 and 1, slowdown={self.slowdown} 1 or more"
            )

    @property
    def have_no_effect(self) -> bool:
        """Whether all ranks compute as fast as the profile says."""
        return self.jitter == 0 and (self.probability == 0 or self.slowdown == 1)

    def num_awaited(self, num_ranks: int) -> int:
        """The number of ranks whose gradients count."""
        if self.num_backups >= num_ranks:
            raise PlanError(
                f"num_backups={self.num_backups} leaves no rank of {num_ranks} to wait for: choose a smaller number"
            )
        return num_ranks - self.num_backups

    def paces(self, num_ranks: int, num_steps: int = NUM_STEPS) -> list[float]:
        """The pace of the last rank that is waited for, in each of `num_steps` steps.

        A pace is the compute time of a rank as a multiple of the profile's.
        """
        draw, awaited = random.Random(self.seed), self.num_awaited(num_ranks)
        return [self._quantile(draw.betavariate(awaited, self.num_backups + 1)) for _ in range(num_steps)]

    def _quantile(self, share: float) -> float:
        """The pace that this share of all ranks stays within, by bisection of the distribution of paces."""
        usual_share = 1 - self.probability
        if self.jitter == 0:
            return 1.0 if share <= usual_share else self.slowdown
        usual = statistics.NormalDist(1.0, self.jitter)
        low, high = 0.0, self.slowdown * (1 + 10 * self.jitter)
        for _ in range(50):
            middle = (low + high) / 2
            below = usual_share * usual.cdf(middle) + self.probability * usual.cdf(middle / self.slowdown)
            low, high = (middle, high) if below < share else (low, middle)
        return high


def simulate_with(stragglers: Stragglers, profile: Profile, plan: CommPlan, comm_costs: CommCosts) -> Step:
    """A step whose length is the mean over several steps with stragglers.

    The step that is nearest to the mean gives the spans. Compute time is that of the profile, so the time that ranks
    wait for slower ones counts as exposed.
    """
    if stragglers.have_no_effect or plan.topology.world_size == 1:
        return simulate(profile, plan, comm_costs)
    paces = stragglers.paces(plan.topology.world_size)
    steps = {pace: simulate(profile.scaled(pace), plan, comm_costs) for pace in set(paces)}
    mean_s = statistics.fmean(steps[pace].step_s for pace in paces)
    typical = min(steps.values(), key=lambda step: abs(step.step_s - mean_s))
    return replace(typical, step_s=mean_s, compute_s=profile.compute_s)
