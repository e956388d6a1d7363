"""Simulates a training step of one rank on the plan and the table that the strategy uses.

    compute    [ forward ][ backward              ][ wait ][ update ]
    inside         reduce |0 |1 |  |2 |                  broadcasts give way to reduces: |0 |1|..|2 |
    between               scatter |0   |1   |2    |      in the order of the pieces

A bucket is ready with its last gradient and after the bucket before it. Its pieces pass the stages of their algorithm
as in the engine; a link carries one phase at a time. All ranks do the same at the same time, so one stands for all.
The order on each link is fixed, so with the same algorithms a faster link never makes a step slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from lightning_fourmin.comm.cost import Link, Links, PhaseCost, phase_costs
from lightning_fourmin.comm.engine import CHUNK_BYTES
from lightning_fourmin.comm.fusion import FusionPlan
from lightning_fourmin.comm.table import AllReduceTable
from lightning_fourmin.comm.topology import Topology
from lightning_fourmin.predict.profile import Profile

IN_PIECES = ("hierarchical", "torus")
"""Algorithms whose large buckets the engine cuts."""


@dataclass(frozen=True)
class Plan:
    """What goes over which links, and how."""

    fusion: FusionPlan
    table: AllReduceTable
    topology: Topology
    links: Links
    wire_itemsize: int | None = None
    """Bytes of a number on the wire; None: those of the gradients."""
    chunk_bytes: int = CHUNK_BYTES
    """Larger buckets go in pieces of about this size (not in the ring)."""
    host: Link | None = None
    """What a piece costs on cores that compute as well (ranks on CPU): that time cannot overlap with compute."""


@dataclass(frozen=True)
class Span:
    """Something that took time, in a lane of the trace."""

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
    """Time in which at least one bucket was under way."""
    spans: tuple[Span, ...]

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return self.step_s - self.compute_s


@dataclass
class _Piece:
    bucket: int
    algorithm: str
    num_bytes: int
    phases: tuple[PhaseCost, ...]
    at_s: float
    """When it is ready, later when it is done."""


class _Link:
    """Carries one phase at a time, in the order in which they are given."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy: list[tuple[float, float]] = []

    def carry(self, at_s: float, took_s: float) -> tuple[float, float]:
        start_s = max(at_s, self.free_s)
        self.free_s = start_s + took_s
        self.busy.append((start_s, self.free_s))
        return start_s, self.free_s


class _Gaps:
    """What is left of a link between the phases that it carries first."""

    def __init__(self, link: _Link) -> None:
        self._busy, self._next, self._free_s = link.busy, 0, 0.0

    def carry(self, at_s: float, took_s: float) -> tuple[float, float]:
        now_s = max(at_s, self._free_s)
        begun_s: float | None = None
        while self._next < len(self._busy):
            busy_from_s, busy_to_s = self._busy[self._next]
            if busy_to_s > now_s:
                if now_s + took_s <= busy_from_s:
                    break
                if busy_from_s > now_s:
                    begun_s = now_s if begun_s is None else begun_s
                    took_s -= busy_from_s - now_s
                now_s = busy_to_s
            self._next += 1
        self._free_s = now_s + took_s
        return (now_s if begun_s is None else begun_s), self._free_s


def simulate(profile: Profile, plan: Plan) -> Step:
    """One step without noise."""
    ended_s = profile.forward_s + profile.backward_s
    spans = [
        Span("main", "forward", 0.0, profile.forward_s),
        Span("main", "backward", profile.forward_s, ended_s),
    ]
    done_s, comm_s = ended_s, 0.0
    if plan.topology.world_size > 1 and (pieces := _pieces(profile, plan)):
        ready = [piece.at_s for piece in pieces]
        spans += _carried(pieces, one_link=plan.topology.groups_span_nodes)
        host_s = 0.0
        if plan.host is not None:
            host_s = sum(plan.host.latency_s + piece.num_bytes * plan.host.s_per_byte for piece in pieces)
        done_s = max(ended_s + host_s, *(piece.at_s for piece in pieces))
        comm_s = _union_s(list(zip(ready, (piece.at_s for piece in pieces), strict=True)))
    step_s = done_s + profile.update_s
    spans.append(Span("main", "optimizer step", done_s, step_s))
    return Step(step_s, profile.compute_s, comm_s, tuple(spans))


def _pieces(profile: Profile, plan: Plan) -> list[_Piece]:
    ready_s = {gradient.name: profile.forward_s + gradient.ready_s for gradient in profile.gradients}

    @cache
    def costs(algorithm: str, num_bytes: int) -> tuple[PhaseCost, ...]:
        return phase_costs(algorithm, num_bytes, plan.topology, plan.links)

    pieces = []
    at_s = 0.0
    for index, bucket in enumerate(plan.fusion.buckets):
        at_s = max(at_s, *(ready_s[name] for name in bucket.names))
        itemsize = plan.wire_itemsize or bucket.dtype.itemsize
        numel = bucket.num_bytes // bucket.dtype.itemsize
        if not numel:
            continue
        algorithm = plan.table.choose(numel * itemsize)
        num_pieces = -(-numel * itemsize // plan.chunk_bytes) if algorithm in IN_PIECES else 1
        smaller, larger = divmod(numel, num_pieces)
        for piece in range(num_pieces):
            num_bytes = (smaller + (piece < larger)) * itemsize
            pieces.append(_Piece(index, algorithm, num_bytes, costs(algorithm, num_bytes), at_s))
    return pieces


def _carried(pieces: Sequence[_Piece], one_link: bool) -> list[Span]:
    """Takes all pieces through their phases; `one_link`: groups reach over nodes, so all phases share that link."""
    inside, between = _Link(), _Link()
    spans = []

    def carry(piece: _Piece, phase: PhaseCost, link: _Link | _Gaps) -> None:
        start_s, piece.at_s = link.carry(piece.at_s, phase.total_s)
        details = {"algorithm": piece.algorithm, "bytes": piece.num_bytes}
        spans.append(Span(phase.stage, f"bucket {piece.bucket}", start_s, piece.at_s, details))

    for piece in pieces:
        for phase in piece.phases:
            if one_link or phase.stage != "broadcast":
                carry(piece, phase, inside if phase.stage == "reduce" and not one_link else between)
    if not one_link:
        gaps = _Gaps(inside)
        for piece in pieces:
            for phase in piece.phases:
                if phase.stage == "broadcast":
                    carry(piece, phase, gaps)
    return spans


def _union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of what intervals cover together; they begin in order."""
    total_s, covered_s = 0.0, 0.0
    for start_s, end_s in intervals:
        if end_s > covered_s:
            total_s += end_s - max(start_s, covered_s)
            covered_s = end_s
    return total_s
