"""Simulates a training step of one rank with the plan that the engine carries out.

    compute    [ forward ][ backward              ][ wait ][ update ]
    inside         reduce |0 |1 |  |2 |      broadcasts, in the gaps that reduces leave: |0 |1|..|2 |
    between               scatter |0   |1   |2    |      in the order of the pieces

A bucket is ready when its last gradient is ready and the bucket before it is. It is sent in the pieces of the plan, and
each piece passes the phases of its algorithm one after the other. A link carries one phase at a time. All
ranks do the same at the same time, so one rank stands for all.

The order of phases on each link is fixed: pieces in their order, and on the link inside a node all reduces before
broadcasts. That is why with the same algorithms a faster link never makes a step slower (unless cores serve both
communication and compute).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from lightning_fourmin.allreduce.algorithms import Algorithm
from lightning_fourmin.allreduce.cost import Link, Links, PhaseCost
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.simulate.layer_profile import Profile
from lightning_fourmin.simulate.resources import Cores, Gaps, Wire


@dataclass(frozen=True)
class CommCosts:
    """What communication costs on a cluster: on its links, and where ranks are on CPU also on the cores."""

    links: Links
    host: Link | None = None
    """The time that sending a piece takes from the cores, spread over the time that the piece is between groups."""


@dataclass(frozen=True)
class Span:
    """A part of a step that took time; a trace shows it in one of its lanes."""

    lane: str
    name: str
    start_s: float
    end_s: float
    details: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A simulated step: from the start of forward to the start of the next one."""

    step_s: float
    compute_s: float
    comm_s: float
    """Time in which at least one bucket was in flight."""
    spans: tuple[Span, ...]

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return self.step_s - self.compute_s


@dataclass
class _Piece:
    """A piece of a bucket on its way through the phases of its algorithm."""

    bucket: int
    algorithm: Algorithm
    num_bytes: int
    ready_s: float
    done_s: float
    """The time at which the last of the phases that the piece has passed so far was over."""


def simulate(profile: Profile, plan: CommPlan, comm_costs: CommCosts) -> Step:
    """Simulates a step in which every rank computes exactly as the profile says."""
    cores = Cores()
    pieces, spans = ([], []) if plan.topology.world_size == 1 else _communicate(profile, plan, comm_costs, cores)
    ended_s = cores.reach(profile.forward_s + profile.backward_s)
    done_s = max([ended_s, *(piece.done_s for piece in pieces)])
    step_s = done_s + profile.update_s
    main = (
        Span("main", "forward", 0.0, profile.forward_s),
        Span("main", "backward", profile.forward_s, ended_s),
        Span("main", "optimizer step", done_s, step_s),
    )
    comm_s = _union_s([(piece.ready_s, piece.done_s) for piece in pieces])
    return Step(step_s, profile.compute_s, comm_s, (*main, *spans))


def _communicate(
    profile: Profile, plan: CommPlan, comm_costs: CommCosts, cores: Cores
) -> tuple[list[_Piece], list[Span]]:
    """Sends all pieces, and returns them with their times and a span for each of their phases.

    The order of the calls of `carry` is the order on the links; `cores` is told what each piece takes from it.
    """
    done_after_s = {gradient.name: profile.forward_s + gradient.ready_s for gradient in profile.gradients}
    # Groups that span nodes reduce and broadcast between nodes as well, so that link carries all phases.
    one_link = plan.topology.groups_span_nodes
    inside, between = Wire(), Wire()
    pieces: list[_Piece] = []
    spans: list[Span] = []
    broadcasts: list[tuple[_Piece, PhaseCost]] = []

    def carry(piece: _Piece, phase: PhaseCost, link: Wire | Gaps) -> None:
        start_s, piece.done_s = link.carry(piece.done_s, phase.total_s)
        details = {"algorithm": piece.algorithm.name, "bytes": piece.num_bytes}
        spans.append(Span(phase.stage, f"bucket {piece.bucket}", start_s, piece.done_s, details))
        if phase.stage == "scatter" and comm_costs.host is not None:
            host_s = comm_costs.host.latency_s + piece.num_bytes * comm_costs.host.s_per_byte
            cores.serve(start_s, piece.done_s, host_s)

    @cache
    def costs(algorithm: Algorithm, num_bytes: int) -> tuple[PhaseCost, ...]:
        return algorithm.costs(num_bytes, plan.topology, comm_costs.links)

    for index, row in enumerate(plan.rows):
        ready_s = cores.reach(max(done_after_s[name] for name in row.bucket.names))
        for num_bytes in filter(None, row.sending.piece_bytes):
            piece = _Piece(index, row.sending.algorithm, num_bytes, ready_s, ready_s)
            pieces.append(piece)
            for phase in costs(piece.algorithm, num_bytes):
                if phase.stage == "broadcast" and not one_link:
                    broadcasts.append((piece, phase))
                else:
                    carry(piece, phase, inside if phase.stage == "reduce" and not one_link else between)
    # Broadcasts come last, because the gaps are known when all reduces have their places on the link.
    gaps = Gaps(inside)
    for piece, phase in broadcasts:
        carry(piece, phase, gaps)
    return pieces, spans


def _union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of some intervals, which are sorted by their starts."""
    total_s, covered_s = 0.0, 0.0
    for start_s, end_s in intervals:
        if end_s > covered_s:
            total_s += end_s - max(start_s, covered_s)
            covered_s = end_s
    return total_s
