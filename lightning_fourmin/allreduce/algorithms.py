"""All-reduce algorithms as phases; each phase belongs to a stage, and each stage is one thread of the engine.

p ranks in q groups of k, n bytes. Pictures: 2 groups of 2.

ring            the backend's own all-reduce over all ranks; 2(p-1) steps

                0 -> 1 -> 2 -> 3 -> 0

hierarchical    reduce to the leader, all-reduce among leaders, broadcast (the paper's 4.3);
                4(k-1) + 2(q-1) steps as rings, 4 as exchanges of messages (gloo)

                0 <- 1    2 <- 3     reduce
                0 <------ 2          scatter: leaders exchange parts and sum
                0 ------> 2          gather: leaders exchange the sums
                0 -> 1    2 -> 3     broadcast

torus           reduce-scatter in the group, all-reduce across on 1/k of the data, all-gather in the group;
                2(k-1) + 2(q-1) steps as rings, 4 as exchanges of messages

                0 <> 1    2 <> 3     reduce: each keeps its part
                0 <> 2    1 <> 3     scatter, gather
                0 <> 1    2 <> 3     broadcast: each gives its part
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_fourmin.allreduce.collectives import (
    BackendCollectives,
    Collectives,
    Payload,
    Transfer,
    all_reduce,
)
from lightning_fourmin.allreduce.predivide import Scales
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.topology import Topology

STAGES = ("reduce", "scatter", "gather", "broadcast")
ALGORITHMS = ("ring", "hierarchical", "torus")
IN_PIECES = ("hierarchical", "torus")
"""Algorithms whose large buckets are cut, so that the phases of a bucket overlap; a ring has one phase."""

Phase = Callable[[Payload], Transfer]


@dataclass(frozen=True)
class Route:
    """The phases of an algorithm on this rank, by stage, and its factors before the first and after the last."""

    algorithm: str
    phases: Mapping[str, Phase]
    before: float
    after: float

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that have a phase, in their order."""
        return tuple(stage for stage in STAGES if stage in self.phases)


def num_steps(algorithm: str, topology: Topology) -> int:
    """Steps of the algorithm when each collective is a ring, as in the paper's count."""
    p, k, q = topology.world_size, topology.largest_group, len(topology.groups)
    steps = {"ring": 2 * (p - 1), "hierarchical": 4 * (k - 1) + 2 * (q - 1), "torus": 2 * (k - 1) + 2 * (q - 1)}
    return steps[algorithm]


def usable_algorithms(topology: Topology) -> tuple[str, ...]:
    """The algorithms that this topology allows, the simplest first."""
    return ALGORITHMS if topology.equal_groups else ("ring", "hierarchical")


def phase_ranks(algorithm: str, stage: str, topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks that `rank` meets in a phase."""
    if algorithm == "ring":
        return tuple(range(topology.world_size))
    if stage in ("reduce", "broadcast"):
        return topology.group_of(rank)
    return topology.leaders if algorithm == "hierarchical" else topology.column_of(rank)


def build_route(
    algorithm: str,
    topology: Topology,
    groups: ProcessGroups,
    inside: Collectives,
    between: Collectives,
    scales: Scales,
) -> Route:
    """The route of this rank; all ranks build the same routes in the same order, for they make groups together."""
    if algorithm == "ring":
        world = groups.members("scatter", (tuple(range(topology.world_size)),))
        ring: dict[str, Phase] = {} if world is None else {"scatter": lambda payload: all_reduce(payload, world)}
        return Route(algorithm, ring, scales.before, scales.after)
    collect, distribute, across = (
        (inside.reduce, inside.broadcast, (topology.leaders,))
        if algorithm == "hierarchical"
        else (inside.reduce_scatter, inside.all_gather, topology.columns)
    )
    phases = _all_reduce_across(across, groups, between, scales.scatter)
    inward, outward = (groups.members(stage, topology.groups) for stage in ("reduce", "broadcast"))
    if inward is None or outward is None:
        return Route(algorithm, phases, scales.before * scales.reduce, scales.after)
    phases["reduce"] = lambda payload: collect(payload, inward, scales.reduce)
    phases["broadcast"] = lambda payload: distribute(payload, outward)
    return Route(algorithm, phases, scales.before, scales.after)


def _all_reduce_across(
    all_ranks: tuple[tuple[int, ...], ...], groups: ProcessGroups, collectives: Collectives, scale: float
) -> dict[str, Phase]:
    """All-reduce between the groups: in two stages where the messages are ours, in one where the backend does it."""
    scatter = groups.members("scatter", all_ranks)
    if isinstance(collectives, BackendCollectives):
        return {} if scatter is None else {"scatter": lambda payload: all_reduce(payload, scatter)}
    gather = groups.members("gather", all_ranks)
    if scatter is None or gather is None:
        return {}
    return {
        "scatter": lambda payload: collectives.reduce_scatter(payload, scatter, scale),
        "gather": lambda payload: collectives.all_gather(payload, gather),
    }
