"""What a plan means for this rank: its process groups, its shared memory, and its phases for each algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_fourmin.allreduce.algorithms import STAGES, Algorithm, Phase, Transport, algorithm_of
from lightning_fourmin.allreduce.collectives import (
    BackendCollectives,
    Collectives,
    MessageCollectives,
    Scratch,
    SharedCollectives,
)
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.predivide import Scales, scales
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.shared_memory import SharedArena

WHOLE_BYTES = 32 * 1024
"""A piece of up to this size crosses between groups in one exchange instead of two: latency outweighs its bytes."""


@dataclass(frozen=True)
class Route:
    """The phases of an algorithm on this rank by stage, in order, and the factors before the first and after the
    last."""

    algorithm: Algorithm
    phases: Mapping[str, Phase]
    before: float
    after: float

    @classmethod
    def build(cls, algorithm: Algorithm, transport: Transport, factors: Scales) -> "Route":
        """The route of this rank; it makes groups, so all ranks build the same routes in the same order."""
        halves = algorithm.phases(transport, factors)
        phases = {**halves.until_owner, **halves.from_owner}
        # A rank that is alone in its group has no sum there that could be scaled.
        is_alone = algorithm.meets_in_groups and "reduce" not in phases
        before = factors.before * factors.reduce if is_alone else factors.before
        return cls(algorithm, phases, before, factors.after)


class Routes:
    """The routes of a plan on this rank, for each dtype on the wire; made once, in the main thread of every rank."""

    def __init__(self, plan: CommPlan, groups: ProcessGroups, device: torch.device, shared_bytes: int) -> None:
        """`shared_bytes` is what a step puts on the wire, hence what shared memory has to hold; 0 leaves it out."""
        self._plan, self._device = plan, device
        self.scratch = Scratch()
        self._algorithms = [algorithm_of(name) for name in plan.table.algorithms]
        self.arena = self._open_arena(groups, shared_bytes)
        """The shared memory of this rank's group; None where there is none."""
        inside: Collectives = BackendCollectives()
        between: Collectives = BackendCollectives()
        if device.type == "cpu":
            between = MessageCollectives(self.scratch, WHOLE_BYTES)
            inside = MessageCollectives(self.scratch)
            if self.arena is not None:
                inside = SharedCollectives(self.scratch, self.arena)
        self._transport = Transport(plan.topology, groups, inside, between)
        self._routes: dict[torch.dtype, dict[str, Route]] = {}
        # This makes the groups. Backward may ask for routes of other dtypes later, when ranks cannot meet: they need no
        # further groups.
        routes = self._of_dtype(plan.wire_dtype or torch.float32).values()
        self.stages = tuple(stage for stage in STAGES if any(stage in route.phases for route in routes))
        """The stages in which this rank meets anyone."""

    def of(self, algorithm: Algorithm, wire_dtype: torch.dtype) -> Route:
        """The route of an algorithm that the plan's table can choose."""
        return self._of_dtype(wire_dtype)[algorithm.name]

    def _of_dtype(self, wire_dtype: torch.dtype) -> dict[str, Route]:
        if wire_dtype not in self._routes:
            self._routes[wire_dtype] = {}
            for algorithm in self._algorithms:
                local_sums = algorithm.has_local_sums and self._device.type == "cpu"
                factors = scales(self._plan.topology, wire_dtype, self._plan.predivide, local_sums)
                self._routes[wire_dtype][algorithm.name] = Route.build(algorithm, self._transport, factors)
        return self._routes[wire_dtype]

    def _open_arena(self, groups: ProcessGroups, shared_bytes: int) -> SharedArena | None:
        """Shared memory for the ranks of this rank's group, if they are on one node and the plan uses groups."""
        topology, uses_groups = self._plan.topology, any(algorithm.meets_in_groups for algorithm in self._algorithms)
        if self._device.type != "cpu" or not shared_bytes or not uses_groups:
            return None
        members = groups.members("reduce", topology.groups)
        if members is None or len({topology.node_of[rank] for rank in members.ranks}) > 1:
            return None
        # Twice what a step needs: DDP still copies results of a step out of its half while the next one begins.
        num_bytes = 2 * shared_bytes + self._plan.table.chunk_bytes
        return SharedArena.open(members, num_bytes, groups.timeout.total_seconds())
