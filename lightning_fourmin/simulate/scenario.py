"""A scenario: a model on a cluster with the settings of the strategy; what it predicts, and variations of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from lightning_fourmin.allreduce.algorithms import ALGORITHMS
from lightning_fourmin.allreduce.buckets import MIB, FusionPlan
from lightning_fourmin.allreduce.cost import all_reduce_s
from lightning_fourmin.allreduce.table import SIZES, AllReduceTable, Row, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.cluster import Cluster
from lightning_fourmin.simulate.layer_profile import Profile
from lightning_fourmin.simulate.step import Plan, Step
from lightning_fourmin.simulate.stragglers import Stragglers, simulate_with

COMPARED = ("halving_doubling", "parameter_server")
"""Algorithms that are predicted for comparison; the engine does not run them."""


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
        if self.fusion_mb is None:
            return default_fusion_mb(self.topology, self.cluster.backend)
        return self.fusion_mb

    @cached_property
    def plan(self) -> Plan:
        topology = self.topology
        table = self._table(topology)
        return Plan(
            FusionPlan.build(self.parameters, self.used_fusion_mb),
            table if self.chunk_bytes is None else replace(table, chunk_bytes=self.chunk_bytes),
            topology,
            self.cluster.links,
            self.wire_dtype.itemsize,
            self.cluster.host,
        )

    def _table(self, topology: Topology) -> AllReduceTable:
        links, backend = self.cluster.links, self.cluster.backend
        if self.algorithm in COMPARED:
            rows = [Row(n, {self.algorithm: 1e3 * all_reduce_s(self.algorithm, n, topology, links)}) for n in SIZES]
            return AllReduceTable(topology.key, backend, "cost model", tuple(rows))
        table = AllReduceTable.from_cost_model(topology, backend, links)
        if self.measured is not None and self.measured.topology_key == topology.key:
            known = ("hybrid", *self.measured.rows[0].milliseconds)
            table = self.measured if self.algorithm in known else table
        if self.algorithm == "hybrid":
            return table if self.switch_mb is None else table.with_switch(int(self.switch_mb * MIB))
        if self.algorithm not in ALGORITHMS:
            names = ", ".join(("hybrid", *ALGORITHMS, *COMPARED))
            raise PlanError(f"algorithm={self.algorithm!r} is not known: choose one of {names}")
        try:
            return table.only(self.algorithm)
        except ValueError as error:
            raise PlanError(str(error)) from error

    @cached_property
    def step(self) -> Step:
        return simulate_with(self.stragglers, self.profile, self.plan)

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
            len(self.plan.fusion.buckets),
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
        "without hybrid": replace(scenario, algorithm="ring", switch_mb=None, measured=None),
    }
    none = replace(without["without FP16"], fusion_mb=0.0, algorithm="ring", switch_mb=None, measured=None)
    return {"all": scenario, **without, "none": none}


def scaling_curve(scenario: Scenario, most_ranks: int) -> list[Prediction]:
    """Predictions for 1, 2, 4 ... ranks; where they do not fill the groups, with what they allow."""
    curve = []
    num_ranks = 1
    while num_ranks <= most_ranks:
        group_size = scenario.group_size if (scenario.group_size or 0) <= num_ranks else None
        equal = scenario.cluster.topology(num_ranks, group_size).equal_groups
        algorithm = "hierarchical" if scenario.algorithm == "torus" and not equal else scenario.algorithm
        backups = min(scenario.stragglers.num_backups, num_ranks - 1)
        stragglers = replace(scenario.stragglers, num_backups=backups)
        variant = replace(scenario, num_ranks=num_ranks, group_size=group_size, algorithm=algorithm)
        curve.append(replace(variant, stragglers=stragglers).prediction)
        num_ranks *= 2
    return curve
