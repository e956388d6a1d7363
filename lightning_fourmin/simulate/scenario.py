"""A scenario: a net on a cluster with the settings of the strategy, the step it predicts, and variations of it.

Scenario  --plan-->  CommPlan, as the strategy would decide it  --step-->  Step, simulated  --prediction-->  T = S N e
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from lightning_fourmin.allreduce.algorithms import ALGORITHMS, PREDICTED, Hierarchical, Ring, usable_algorithms
from lightning_fourmin.allreduce.plan import HYBRID, CommOptions, CommPlan
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.cluster import Cluster
from lightning_fourmin.simulate.layer_profile import Profile
from lightning_fourmin.simulate.step import CommCosts, Step
from lightning_fourmin.simulate.stragglers import Stragglers, simulate_with

FUSION_MB = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""The fusion thresholds among which `fastest` chooses."""
EVERY_GRADIENT_ALONE_MB = 1e-9
"""A fusion threshold below any gradient."""


@dataclass(frozen=True)
class Prediction:
    """The factors of T = S * N * e, and where the time of a step goes."""

    S: float
    """Samples a second of one rank that does not communicate."""
    N: int
    """The number of ranks."""
    e: float
    """The efficiency: T as a share of S * N."""
    T: float
    """Samples a second of all ranks."""
    step_ms: float
    compute_ms: float
    comm_ms: float
    """Time with at least one bucket in flight."""
    exposed_ms: float
    """The time that communication adds to the step."""
    num_buckets: int
    algorithms: tuple[str, ...]
    """The algorithms of all buckets, by name."""


@dataclass(frozen=True)
class Scenario:
    """Everything that a prediction depends on; `dataclasses.replace` makes variations."""

    parameters: Sequence[tuple[str, nn.Parameter]] = field(repr=False)
    profile: Profile = field(repr=False)
    cluster: Cluster = field(repr=False)
    num_ranks: int
    fusion_mb: float | None = None
    """The fusion threshold; None takes that of the measured table, or the strategy's default for the topology."""
    algorithm: str = "hybrid"
    group_size: int | None = None
    switch_mb: float | None = None
    chunk_bytes: int | None = None
    """The size of the pieces in which larger buckets are sent, roughly; None takes the size that the table says."""
    wire_dtype: torch.dtype = torch.float32
    stragglers: Stragglers = field(default_factory=Stragglers)
    measured: AllReduceTable | None = field(default=None, repr=False)
    """A table of `fourmin tune`, used instead of the cost model if it is of this topology and has the algorithm."""

    @property
    def topology(self) -> Topology:
        """The ranks in their groups."""
        return self.cluster.topology(self.num_ranks, self.group_size)

    @property
    def used_fusion_mb(self) -> float:
        """The fusion threshold in MiB: the given one, else that of the measured table, else the strategy's default."""
        if self.fusion_mb is not None:
            return self.fusion_mb
        return self._table().fusion_mb or default_fusion_mb(self.topology, self.cluster.backend)

    @cached_property
    def plan(self) -> CommPlan:
        """The plan that the strategy would decide on the ranks of the scenario."""
        topology, table = self.topology, self._table()
        if self.chunk_bytes is not None:
            table = replace(table, chunk_bytes=self.chunk_bytes)
        try:
            options = CommOptions(
                # The strategy has no option for an algorithm that is only predicted. The table of such a scenario has
                # just that algorithm, so the table's choice is what is asked for.
                HYBRID if self.algorithm in PREDICTED else self.algorithm,
                fusion_mb=max(self.used_fusion_mb, EVERY_GRADIENT_ALONE_MB),
                switch_mb=self.switch_mb,
            )
            return CommPlan.decide(
                options, topology, self.cluster.backend, table, self.parameters, compute_dtype=self.wire_dtype
            )
        except ValueError as error:
            raise PlanError(str(error)) from error

    def _table(self) -> AllReduceTable:
        """The measured table where it fits, else that of the cost model with the cluster's links."""
        topology, links, backend = self.topology, self.cluster.links, self.cluster.backend
        if self.algorithm in PREDICTED:
            return AllReduceTable.from_cost_model(topology, backend, links, [self.algorithm])
        if self.algorithm != HYBRID and self.algorithm not in ALGORITHMS:
            names = ", ".join((HYBRID, *ALGORITHMS, *PREDICTED))
            raise PlanError(f"algorithm={self.algorithm!r} is not known: choose one of {names}")
        measured = self.measured
        if (
            measured is not None
            and measured.topology_key == topology.key
            and self.algorithm in (HYBRID, *measured.rows[0].milliseconds)
        ):
            # The groups of the scenario are those of the table already.
            return replace(measured, group_size=None)
        return AllReduceTable.from_cost_model(topology, backend, links)

    @cached_property
    def step(self) -> Step:
        """The simulated step, which with stragglers has the mean length of several."""
        comm_costs = CommCosts(self.cluster.links, self.cluster.host)
        return simulate_with(self.stragglers, self.profile, self.plan, comm_costs)

    @cached_property
    def prediction(self) -> Prediction:
        """The figures of the simulated step."""
        step, profile = self.step, self.profile
        total = self.stragglers.num_awaited(self.num_ranks) * profile.batch_size / step.step_s
        chosen = {str(span.details["algorithm"]) for span in step.spans if "algorithm" in span.details}
        return Prediction(
            profile.samples_per_s,
            self.num_ranks,
            total / (profile.samples_per_s * self.num_ranks),
            total,
            1e3 * step.step_s,
            1e3 * step.compute_s,
            1e3 * step.comm_s,
            1e3 * step.exposed_s,
            len(self.plan.rows),
            tuple(sorted(chosen)),
        )


@dataclass(frozen=True)
class TrainingTime:
    """How long some epochs take."""

    epochs: int
    num_steps: int
    hours: float


def training_time(scenario: Scenario, epochs: int, num_samples: int) -> TrainingTime:
    """How long `epochs` epochs of `num_samples` samples take, in whole steps of the global batch.

    The samples that fill no step at the end of an epoch count into the next epoch.
    """
    batch = scenario.profile.batch_size * scenario.stragglers.num_awaited(scenario.num_ranks)
    num_steps = max(1, round(epochs * num_samples / batch))
    return TrainingTime(epochs, num_steps, num_steps * scenario.step.step_s / 3600)


def techniques(scenario: Scenario, fp32_profile: Profile) -> dict[str, Scenario]:
    """The scenario as it is, without each of the paper's techniques, and without all of them."""
    without = {
        "without fusion": replace(scenario, fusion_mb=0.0),
        "without FP16": replace(scenario, profile=fp32_profile, wire_dtype=torch.float32),
        "without hybrid": replace(scenario, algorithm=Ring.name, switch_mb=None, measured=None),
    }
    none = replace(without["without FP16"], fusion_mb=0.0, algorithm=Ring.name, switch_mb=None, measured=None)
    return {"all": scenario, **without, "none": none}


def fastest(scenario: Scenario) -> Scenario:
    """The scenario with the best fusion threshold and all-reduce, where it leaves them open; of equal ones the first.

    The defaults are made for any net: where latency makes them choose large buckets, a net with few gradients waits
    for its last one.
    """
    fusion_mb = (None, *FUSION_MB) if scenario.fusion_mb is None else (scenario.fusion_mb,)
    is_free = scenario.algorithm == HYBRID and scenario.switch_mb is None
    algorithms = (HYBRID, *usable_algorithms(scenario.topology)) if is_free else (scenario.algorithm,)
    return fastest_of(replace(scenario, fusion_mb=mb, algorithm=name) for name in algorithms for mb in fusion_mb)


def fastest_of(scenarios: Iterable[Scenario]) -> Scenario:
    """The fastest scenario; of equally fast ones the first."""
    return min(scenarios, key=lambda scenario: scenario.step.step_s)


def scaling_curve(scenario: Scenario, most_ranks: int) -> list[Prediction]:
    """Predictions for 1, 2, 4 ... ranks, each with the best of the settings that the scenario leaves open.

    Few ranks do not allow every setting: groups that are larger than all ranks become the nodes, an algorithm that
    cannot run becomes the hierarchical one, and backup workers are so few that one rank is left to wait for.
    """
    curve = []
    for num_ranks in (2**power for power in range(most_ranks.bit_length())):
        group_size = scenario.group_size if (scenario.group_size or 0) <= num_ranks else None
        topology = scenario.cluster.topology(num_ranks, group_size)
        usable = scenario.algorithm not in ALGORITHMS or ALGORITHMS[scenario.algorithm].usable(topology)
        algorithm = scenario.algorithm if usable else Hierarchical.name
        backups = min(scenario.stragglers.num_backups, num_ranks - 1)
        stragglers = replace(scenario.stragglers, num_backups=backups)
        variant = replace(
            scenario, num_ranks=num_ranks, group_size=group_size, algorithm=algorithm, stragglers=stragglers
        )
        curve.append(fastest(variant).prediction)
    return curve
