"""The all-reduce algorithms, a class each: who meets whom, in which phases, and what that costs.

In formulas p ranks are in q groups of k and send n bytes. A phase belongs to a stage of the engine, and the stages come
in two halves: `reduce` and `scatter` run until the owner of each part of the gradients holds its sum, `gather` and
`broadcast` bring the sums from their owners to all. The halves may start at different times and in different dtypes; a
ring, which the backend runs as one operation, has no halves.

To add an algorithm, write its class, with its picture, and name the class in `ALGORITHMS`. The strategy's options, the
table, the tuner, the simulator, the pages and the pictures of the docs take it from there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from lightning_fourmin.allreduce.collectives import Collectives, Payload, Transfer, all_reduce
from lightning_fourmin.allreduce.cost import Link, Links, PhaseCost, total_s
from lightning_fourmin.allreduce.predivide import Scales
from lightning_fourmin.allreduce.process_groups import Members, ProcessGroups
from lightning_fourmin.allreduce.topology import Topology

UNTIL_OWNER, FROM_OWNER = ("reduce", "scatter"), ("gather", "broadcast")
STAGES = (*UNTIL_OWNER, *FROM_OWNER)
"""The stages of the engine in their order; on CPU each one is a thread."""

Phase = Callable[[Payload], Transfer]


@dataclass(frozen=True)
class Transport:
    """What a rank builds the phases of an algorithm from: process groups, and collectives in and between groups."""

    topology: Topology
    groups: ProcessGroups
    inside: Collectives
    """Collectives of the ranks of a group."""
    between: Collectives
    """Collectives of ranks of different groups."""


@dataclass(frozen=True)
class Phases:
    """The phases of an algorithm on this rank by stage, in order; stages in which it meets nobody are left out."""

    until_owner: Mapping[str, Phase] = field(default_factory=dict)
    """Phases after which each part's sum is with the rank that owns the part, as the payload's `live`."""
    from_owner: Mapping[str, Phase] = field(default_factory=dict)
    """Phases that bring the payload's `live` of each owner to all ranks."""
    enter_owner: Callable[[Payload], None] = lambda payload: None
    """Narrows a fresh payload to the part that this rank owns, so that the second half can run without the first."""


class Algorithm(ABC):
    """One way to sum the gradients of all ranks. Its objects have no state; `ALGORITHMS` and `PREDICTED` hold them."""

    name: ClassVar[str]
    in_pieces: ClassVar[bool] = True
    """Whether large buckets are cut into pieces, so that the phases of one bucket overlap."""
    meets_in_groups: ClassVar[bool] = True
    """Whether ranks of a group meet by themselves, in shared memory where they can."""
    has_local_sums: ClassVar[bool] = True
    """Whether this package adds up on CPU, in FP32; otherwise the backend does, in the wire's dtype."""
    needs: ClassVar[str] = ""
    """For an error text: what a topology must have for this algorithm, and what the user can change."""

    def usable(self, topology: Topology) -> bool:
        """Whether the ranks of this topology can run it."""
        return True

    def parts(self, topology: Topology) -> int:
        """Parts of one size that the backend's own collectives cut a piece into; on CUDA a piece is padded for that."""
        return 1

    @abstractmethod
    def num_steps(self, topology: Topology) -> int:
        """Messages one after the other when every collective is a ring, as the paper counts them."""

    def peers(self, stage: str, topology: Topology, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` meets in a stage, itself included: all ranks where there are no groups."""
        return tuple(range(topology.world_size))

    @abstractmethod
    def costs(self, num_bytes: int, topology: Topology, links: Links) -> tuple[PhaseCost, ...]:
        """The cost of each phase for so many bytes."""

    def seconds(self, num_bytes: int, topology: Topology, links: Links) -> float:
        """Seconds that one all-reduce of so many bytes takes by itself."""
        return total_s(self.costs(num_bytes, topology, links))

    def phases(self, transport: Transport, scales: Scales) -> Phases:
        """The phases of this rank. All ranks call this for the same algorithms in the same order: it makes groups."""
        raise TypeError(f"{self.name} is predicted only")


class _Flat(Algorithm):
    """An algorithm over all ranks, which knows no groups (Thakur et al.)."""

    in_pieces = False
    meets_in_groups = False
    has_local_sums = False

    @override
    def num_steps(self, topology: Topology) -> int:
        return round(self._counts(topology.world_size)[0])

    @override
    def costs(self, num_bytes: int, topology: Topology, links: Links) -> tuple[PhaseCost, ...]:
        num_steps, num_copies, num_sums = self._counts(topology.world_size)
        wire, num_nics = (links.between, links.num_nics) if topology.num_nodes > 1 else (links.inside_backend, 1)
        transfer_s = num_copies * num_bytes * wire.s_per_byte / num_nics
        sums_s = num_sums * num_bytes * links.reduce_s_per_byte
        return (PhaseCost("scatter", num_steps * wire.latency_s, transfer_s, sums_s),)

    @abstractmethod
    def _counts(self, p: int) -> tuple[float, float, float]:
        """The number of steps, how often each byte is sent, and how often it is summed, on p ranks."""


class Ring(_Flat):
    """The backend's own all-reduce over all ranks, in 2(p-1) steps.

    0 -> 1 -> 2 -> 3 -> 0
    """

    name = "ring"

    @override
    def _counts(self, p: int) -> tuple[float, float, float]:
        return 2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p

    @override
    def phases(self, transport: Transport, scales: Scales) -> Phases:
        world = transport.groups.members("scatter", (tuple(range(transport.topology.world_size)),))
        return Phases() if world is None else Phases({"scatter": lambda payload: all_reduce(payload, world)})


class Hierarchical(Algorithm):
    """Reduce to the leader of a group, all-reduce among the leaders, broadcast (section 4.3 of the paper).

    Takes 4(k-1) + 2(q-1) steps as rings, 4 as exchanges of messages (gloo). With 2 groups of 2:

    0 <- 1    2 <- 3     reduce
    0 <------ 2          scatter: the leaders exchange parts and sum them
    0 ------> 2          gather: the leaders exchange the sums
    0 -> 1    2 -> 3     broadcast
    """

    name = "hierarchical"

    @override
    def num_steps(self, topology: Topology) -> int:
        return 4 * (topology.largest_group - 1) + 2 * (len(topology.groups) - 1)

    @override
    def peers(self, stage: str, topology: Topology, rank: int) -> tuple[int, ...]:
        return topology.group_of(rank) if stage in ("reduce", "broadcast") else topology.leaders

    @override
    def costs(self, num_bytes: int, topology: Topology, links: Links) -> tuple[PhaseCost, ...]:
        q = len(topology.groups)
        rounds = 2 * (topology.largest_group - 1)
        return _grouped_cost(num_bytes, topology, links, rounds, senders_a_node=q / topology.num_nodes, share=1.0)

    @override
    def phases(self, transport: Transport, scales: Scales) -> Phases:
        inside = transport.inside
        across = (transport.topology.leaders,)
        return _grouped_phases(transport, across, scales, inside.reduce, inside.broadcast, inside.enter_leader)


class Torus(Algorithm):
    """Reduce-scatter in the group, all-reduce across on 1/k of the data, all-gather in the group.

    Takes 2(k-1) + 2(q-1) steps as rings, 4 as exchanges of messages. With 2 groups of 2:

    0 <> 1    2 <> 3     reduce: each keeps its part
    0 <> 2    1 <> 3     scatter, gather
    0 <> 1    2 <> 3     broadcast: each gives its part
    """

    name = "torus"
    needs = "the torus needs groups of equal size; choose a group_size that divides every node"

    @override
    def usable(self, topology: Topology) -> bool:
        return topology.equal_groups

    @override
    def parts(self, topology: Topology) -> int:
        return topology.largest_group

    @override
    def num_steps(self, topology: Topology) -> int:
        return 2 * (topology.largest_group - 1) + 2 * (len(topology.groups) - 1)

    @override
    def peers(self, stage: str, topology: Topology, rank: int) -> tuple[int, ...]:
        return topology.group_of(rank) if stage in ("reduce", "broadcast") else topology.column_of(rank)

    @override
    def costs(self, num_bytes: int, topology: Topology, links: Links) -> tuple[PhaseCost, ...]:
        k, senders_a_node = topology.largest_group, topology.world_size / topology.num_nodes
        return _grouped_cost(num_bytes, topology, links, k - 1, senders_a_node, share=1 / k)

    @override
    def phases(self, transport: Transport, scales: Scales) -> Phases:
        inside = transport.inside
        across = transport.topology.columns
        return _grouped_phases(transport, across, scales, inside.reduce_scatter, inside.all_gather, inside.enter_part)


class HalvingDoubling(_Flat):
    """Recursive halving, then doubling (Thakur et al.): 2 log2(p) steps.

    Ranks beyond a power of two hand their gradients to another rank first and get the sums last.
    """

    name = "halving_doubling"

    @override
    def _counts(self, p: int) -> tuple[float, float, float]:
        doublings = p.bit_length() - 1
        size = 1 << doublings
        extra = int(p > size)
        return 2 * doublings + 2 * extra, 2 * (size - 1) / size + 2 * extra, (size - 1) / size + extra


class ParameterServer(_Flat):
    """One server: all gradients go to it, and all sums come from it."""

    name = "parameter_server"

    @override
    def _counts(self, p: int) -> tuple[float, float, float]:
        return 2, 2 * (p - 1), p - 1


ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (Ring(), Hierarchical(), Torus())}
"""The algorithms that the engine runs, by name, the simplest first: a tie goes to the first."""
PREDICTED: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (HalvingDoubling(), ParameterServer())}
"""Algorithms that are not implemented; the simulator predicts them for comparison."""


def algorithm_of(name: str) -> Algorithm:
    """The algorithm of a name, run or predicted."""
    known = ALGORITHMS | PREDICTED
    if name not in known:
        raise ValueError(f"algorithm={name!r} is not known: choose one of {', '.join(known)}")
    return known[name]


def usable_algorithms(topology: Topology) -> tuple[str, ...]:
    """Names of the algorithms that the ranks of this topology can run, the simplest first."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.usable(topology))


def _grouped_phases(
    transport: Transport,
    across: tuple[tuple[int, ...], ...],
    scales: Scales,
    collect: Callable[[Payload, Members, float], Transfer],
    distribute: Callable[[Payload, Members], Transfer],
    enter_inside: Callable[[Payload, Members], None],
) -> Phases:
    """Phases of an algorithm that collects in groups, all-reduces `across` them, and distributes in groups."""
    groups, between = transport.groups, transport.between
    until_owner: dict[str, Phase] = {}
    from_owner: dict[str, Phase] = {}
    # All ranks make the groups in this order.
    scatter = groups.members("scatter", across)
    gather = groups.members("gather", across) if between.has_halves else None
    inward, outward = (groups.members(stage, transport.topology.groups) for stage in ("reduce", "broadcast"))
    if inward is not None:
        until_owner["reduce"] = lambda payload: collect(payload, inward, scales.reduce)
    if scatter is not None and gather is not None:
        until_owner["scatter"] = lambda payload: between.reduce_scatter(payload, scatter, scales.scatter)
        from_owner["gather"] = lambda payload: between.all_gather(payload, gather)
    elif scatter is not None:
        # The backend sums and distributes between the groups in one operation.
        until_owner["scatter"] = lambda payload: all_reduce(payload, scatter)
    if outward is not None:
        from_owner["broadcast"] = lambda payload: distribute(payload, outward)

    def enter_owner(payload: Payload) -> None:
        if inward is not None:
            enter_inside(payload, inward)
        if scatter is not None and gather is not None:
            between.enter_part(payload, scatter)

    return Phases(until_owner, from_owner, enter_owner)


def _grouped_cost(
    num_bytes: int, topology: Topology, links: Links, num_rounds: int, senders_a_node: float, share: float
) -> tuple[PhaseCost, ...]:
    """The cost of an all-reduce in groups (Jia et al. 4.3).

    A node has `senders_a_node` ranks that send to other groups, and each of them sends `share` of the bytes.
    """
    n, k, q, g = num_bytes, topology.largest_group, len(topology.groups), links.reduce_s_per_byte
    several_nodes = topology.num_nodes > 1
    wire, num_nics = (links.between, links.num_nics) if several_nodes else (links.inside_backend, 1)
    # A group that reaches over several nodes is as slow as the link between them.
    inside: Link = links.between if topology.groups_span_nodes else links.inside
    one_way = num_rounds * inside.latency_s, num_rounds / k * n * inside.s_per_byte
    # Ranks of a node that send at once share its links: their messages queue.
    queue = max(1.0, senders_a_node / num_nics) if several_nodes else 1.0
    across_s = 2 * (q - 1) / q * n * share * queue * wire.s_per_byte
    return (
        PhaseCost("reduce", *one_way, (k - 1) / k * n * g),
        PhaseCost("scatter", queue * 2 * (q - 1) * wire.latency_s, across_s, (q - 1) / q * n * share * g),
        PhaseCost("broadcast", *one_way),
    )
