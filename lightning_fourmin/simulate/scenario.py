"""A scenario: a model on a cluster with the settings of the strategy; what it predicts, and variations of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from lightning_fourmin.allreduce.algorithms import ALGORITHMS, PREDICTED, Hierarchical, Ring
from lightning_fourmin.allreduce.plan import HYBRID, CommOptions, CommPlan
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.cluster import Cluster
from lightning_fourmin.simulate.layer_profile import Profile
from lightning_fourmin.simulate.step import Step, Wires
from lightning_fourmin.simulate.stragglers import Stragglers, simulate_with

EVERY_GRADIENT_ALONE_MB = 1e-9
"""A fusion threshold below any gradient."""


@dataclass(frozen=True)
class Prediction:
    """T = S * N * e, and where the time of a step goes."""

    S: float
    """Samples a second of one rank without communication."""
    N: int
    e: float
    T: float
    step_ms: float
    compute_ms: float
    comm_ms: float
    """With at least one bucket under way."""
    exposed_ms: float
    num_buckets: int
    algorithms: tuple[str, ...]
    """Those that the buckets take."""


@dataclass(frozen=True)
class Scenario:
    """Everything that a prediction depends on; `dataclasses.replace` makes variations."""

    parameters: Sequence[tuple[str, nn.Parameter]] = field(repr=False)
    profile: Profile = field(repr=False)
    cluster: Cluster = field(repr=False)
    num_ranks: int
    fusion_mb: float | None = None
    """None: the strategy's default for the topology."""
    algorithm: str = "hybrid"
    group_size: int | None = None
    switch_mb: float | None = None
    chunk_bytes: int | None = None
    """Larger buckets go in pieces of about this size; None: what the table says."""
    wire_dtype: torch.dtype = torch.float32
    stragglers: Stragglers = field(default_factory=Stragglers)
    measured: AllReduceTable | None = field(default=None, repr=False)
    """Takes the place of the cost model for the topology and the algorithms that it knows."""

    @property
    def topology(self) -> Topology:
        return self.cluster.topology(self.num_ranks, self.group_size)

    @property
    def used_fusion_mb(self) -> float:
        """The fusion threshold: as given, as `fourmin tune` found it best, or the strategy's default."""
        if self.fusion_mb is not None:
            return self.fusion_mb
        return self._table().fusion_mb or default_fusion_mb(self.topology, self.cluster.backend)

    @cached_property
    def plan(self) -> CommPlan:
        """The plan that the strategy would decide on such ranks."""
        topology, table = self.topology, self._table()
        if self.chunk_bytes is not None:
            table = replace(table, chunk_bytes=self.chunk_bytes)
        try:
            options = CommOptions(
                # A table of predicted algorithms has only those.
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
        topology, links, backend = self.topology, self.cluster.links, self.cluster.backend
        if self.algorithm in PREDICTED:
            return AllReduceTable.from_cost_model(topology, backend, links, [self.algorithm])
        if self.algorithm != HYBRID and self.algorithm not in ALGORITHMS:
            names = ", ".join((HYBRID, *ALGORITHMS, *PREDICTED))
            raise PlanError(f"algorithm={self.algorithm!r} is not known: choose one of {names}")
        measured = self.measured
        known = () if measured is None else (HYBRID, *measured.rows[0].milliseconds)
        if measured is not None and measured.topology_key == topology.key and self.algorithm in known:
            # The groups are those of the scenario.
            return replace(measured, group_size=None)
        return AllReduceTable.from_cost_model(topology, backend, links)

    @property
    def wires(self) -> Wires:
        """What the plan is carried out on."""
        return Wires(self.cluster.links, self.cluster.host)

    @cached_property
    def step(self) -> Step:
        return simulate_with(self.stragglers, self.profile, self.plan, self.wires)

    @cached_property
    def prediction(self) -> Prediction:
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
class Training:
    """How long E epochs take."""

    epochs: int
    num_steps: int
    hours: float


def train(scenario: Scenario, epochs: int, num_samples: int) -> Training:
    """Whole steps of the global batch; an epoch's remainder goes into the next one."""
    batch = scenario.profile.batch_size * scenario.stragglers.num_awaited(scenario.num_ranks)
    num_steps = max(1, round(epochs * num_samples / batch))
    return Training(epochs, num_steps, num_steps * scenario.step.step_s / 3600)


def techniques(scenario: Scenario, fp32_profile: Profile) -> dict[str, Scenario]:
    """The scenario with all it has, without each of the paper's techniques, and with none."""
    without = {
        "without fusion": replace(scenario, fusion_mb=0.0),
        "without FP16": replace(scenario, profile=fp32_profile, wire_dtype=torch.float32),
        "without hybrid": replace(scenario, algorithm=Ring.name, switch_mb=None, measured=None),
    }
    none = replace(without["without FP16"], fusion_mb=0.0, algorithm=Ring.name, switch_mb=None, measured=None)
    return {"all": scenario, **without, "none": none}


def scaling_curve(scenario: Scenario, most_ranks: int) -> list[Prediction]:
    """Predictions for 1, 2, 4 ... ranks; where they do not fill the groups, with what they allow."""
    curve = []
    num_ranks = 1
    while num_ranks <= most_ranks:
        group_size = scenario.group_size if (scenario.group_size or 0) <= num_ranks else None
        topology = scenario.cluster.topology(num_ranks, group_size)
        usable = scenario.algorithm not in ALGORITHMS or ALGORITHMS[scenario.algorithm].usable(topology)
        algorithm = scenario.algorithm if usable else Hierarchical.name
        backups = min(scenario.stragglers.num_backups, num_ranks - 1)
        stragglers = replace(scenario.stragglers, num_backups=backups)
        variant = replace(scenario, num_ranks=num_ranks, group_size=group_size, algorithm=algorithm)
        curve.append(replace(variant, stragglers=stragglers).prediction)
        num_ranks *= 2
    return curve
