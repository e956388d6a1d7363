"""The table that decides: message size -> algorithm, with the milliseconds behind each choice."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from lightning_fourmin.allreduce.algorithms import IN_PIECES, usable_algorithms
from lightning_fourmin.allreduce.buckets import MIB, FusionPlan
from lightning_fourmin.allreduce.cost import DEFAULT_LINKS, Links, all_reduce_s, phase_costs
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.text import readable_size


def sizes_up_to(largest_bytes: int) -> list[int]:
    """256 B, 1 KB, 4 KB ... and `largest_bytes` itself (rounded up to whole FP32 numbers)."""
    sizes = [256]
    while sizes[-1] * 4 < largest_bytes:
        sizes.append(sizes[-1] * 4)
    return sizes if largest_bytes <= 256 else [*sizes, -(-largest_bytes // 4) * 4]


SIZES = tuple(sizes_up_to(64 * 1024 * 1024))
"""256 B to 64 MiB, the sizes that the cost model fills in."""
CHUNK_BYTES = 1024 * 1024
"""The smallest pieces that the cost model cuts buckets into; the largest are of the last of SIZES."""
MOST_FUSED_MB = 32.0
"""By default: with larger buckets backward would have nearly nothing left to hide them behind."""
SWITCH_GAIN = 0.25
"""What another algorithm must save, as shares of the time at each size added up, before a measured table takes it.
Small gains of an all-reduce alone were not seen again in training."""
LATENCY_SHARE = 0.5
"""What latency may add to the time that the bytes of a piece take between groups."""


@dataclass(frozen=True)
class Row:
    """Expected milliseconds of each algorithm at one size."""

    num_bytes: int
    milliseconds: Mapping[str, float]
    spread_ms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lower and upper quartile of what was measured; empty where nothing was."""

    def only(self, algorithm: str) -> "Row":
        spread = {name: spread for name, spread in self.spread_ms.items() if name == algorithm}
        return Row(self.num_bytes, {algorithm: self.milliseconds[algorithm]}, spread)

    @property
    def best(self) -> str:
        return min(self.milliseconds, key=lambda algorithm: self.milliseconds[algorithm])


@dataclass(frozen=True)
class AllReduceTable:
    """Rows by rising size for one topology and backend."""

    topology_key: str
    backend: str
    source: str
    """Where the milliseconds come from, for people: `cost model` or `measured ...`."""
    rows: tuple[Row, ...]
    switch_bytes: int | None = None
    """Given by the user: hierarchical at or below, ring above."""
    group_size: int | None = None
    """Found best by the tuner: ranks a group, where they are not the ranks of a node."""
    chunk_bytes: int = CHUNK_BYTES
    """A bucket with more bytes on the wire goes in pieces (see `num_pieces`)."""
    made: str = ""
    """Date and versions of what measured it."""
    fit: str = ""
    """The links that fit the times, and how well, for people."""

    def choose(self, num_bytes: int) -> str:
        """That of the rows around; where they differ the one with the fewest expected milliseconds."""
        if self.switch_bytes is not None:
            return "hierarchical" if num_bytes <= self.switch_bytes else "ring"
        above = min(bisect_left(self.rows, num_bytes, key=lambda row: row.num_bytes), len(self.rows) - 1)
        choices = {self._choices[above]}
        if above and num_bytes < self.rows[above].num_bytes:
            choices.add(self._choices[above - 1])
        if len(choices) == 1:
            return choices.pop()
        expected = self.expected_ms(num_bytes)
        return min(self.algorithms, key=lambda algorithm: expected[algorithm])

    @cached_property
    def _choices(self) -> tuple[str, ...]:
        """Of each row: the best, where times were computed; where they were measured, as far as that is no chance."""
        if any(row.spread_ms for row in self.rows):
            return _steady_choices([row.milliseconds for row in self.rows])
        return tuple(row.best for row in self.rows)

    def num_pieces(self, algorithm: str, num_bytes: int) -> int:
        """Into how many pieces of nearly the same size a bucket is cut."""
        return max(1, -(-num_bytes // self.chunk_bytes)) if algorithm in IN_PIECES else 1

    def expected_ms(self, num_bytes: int) -> dict[str, float]:
        """Milliseconds of each algorithm: linear between rows, in proportion above the last."""
        above = bisect_left(self.rows, num_bytes, key=lambda row: row.num_bytes)
        if above == 0:
            return dict(self.rows[0].milliseconds)
        if above == len(self.rows):
            last = self.rows[-1]
            return {name: ms * num_bytes / last.num_bytes for name, ms in last.milliseconds.items()}
        low, high = self.rows[above - 1], self.rows[above]
        share = (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)
        return {name: ms + share * (high.milliseconds[name] - ms) for name, ms in low.milliseconds.items()}

    @cached_property
    def algorithms(self) -> tuple[str, ...]:
        """Algorithms that this table can choose: those that are chosen at some row."""
        if self.switch_bytes is not None:
            return ("ring", "hierarchical")
        return tuple(name for name in self.rows[0].milliseconds if name in self._choices)

    def with_switch(self, switch_bytes: int) -> "AllReduceTable":
        """The paper's hybrid with a given switch size."""
        return replace(self, switch_bytes=switch_bytes)

    def only(self, algorithm: str) -> "AllReduceTable":
        """The same table with one algorithm to choose."""
        if algorithm not in self.rows[0].milliseconds:
            known = ", ".join(self.rows[0].milliseconds)
            hint = "measure one that has it"
            if algorithm == "torus":
                hint = "the torus needs groups of equal size; choose a group_size that divides every node"
            raise ValueError(
                f"algorithm={algorithm!r} is not in the table of {self.topology_key} ({known}): {hint}, or use "
                "algorithm='hybrid'"
            )
        return replace(self, rows=tuple(row.only(algorithm) for row in self.rows))

    def groups_of(self, topology: Topology) -> Topology:
        """The ranks in the groups that the table was measured with."""
        return topology if self.group_size is None else topology.with_groups_of(self.group_size)

    def for_plan(self, plan: FusionPlan) -> "AllReduceTable":
        """The table that a plan's buckets go by."""
        return self if plan.algorithm is None else self.only(plan.algorithm)

    @classmethod
    def from_cost_model(cls, topology: Topology, backend: str, links: Links | None = None) -> "AllReduceTable":
        links = links or DEFAULT_LINKS.get(backend, DEFAULT_LINKS["gloo"])
        names = usable_algorithms(topology)

        def milliseconds(algorithm: str, num_bytes: int) -> float:
            # Sums in another order differ in the last digits: that must not decide between algorithms.
            return float(f"{1e3 * all_reduce_s(algorithm, num_bytes, topology, links):.9g}")

        rows = [Row(n, {name: milliseconds(name, n) for name in names}) for n in SIZES]
        chunk_bytes = _chunk_bytes(rows, topology, links)
        return cls(topology.key, backend, "cost model", tuple(rows), chunk_bytes=chunk_bytes)

    def switch_points(self) -> list[tuple[int, str, str]]:
        """Sizes from which on the choice is another, each with the algorithms below and above."""
        if self.switch_bytes is not None:
            return [(self.switch_bytes + 1, "hierarchical", "ring")]
        points = []
        for first, last in pairwise(row.num_bytes for row in self.rows):
            low = first
            while (below := self.choose(low)) != self.choose(last):
                high = last
                while high - low > 1:  # times are linear between rows, so an algorithm is the fastest in one stretch
                    middle = (low + high) // 2
                    low, high = (middle, high) if self.choose(middle) == below else (low, middle)
                points.append((high, below, self.choose(high)))
                low = high
        return points

    def summary(self) -> str:
        """One line: which algorithm up to which size."""
        points = self.switch_points()
        if not points:
            return self.choose(self.rows[0].num_bytes)
        parts = [f"{below} up to {readable_size(at - 1)}" for at, below, _ in points]
        return ", ".join([*parts, f"{points[-1][2]} above"])

    def __str__(self) -> str:
        names = list(self.rows[0].milliseconds)
        lines = [f"all-reduce table for {self.topology_key} on {self.backend} ({self.source})"]
        if self.switch_bytes is not None:
            lines.append(f"switch_mb given: hierarchical up to {self.switch_bytes:,d} bytes, ring above")
        lines.append("  ".join(["       bytes", *(f"{name + ' ms':>16}" for name in names), "choice"]))
        for row in self.rows:
            times = (f"{row.milliseconds[name]:16.3f}" for name in names)
            lines.append("  ".join([f"{row.num_bytes:12,d}", *times, self.choose(row.num_bytes)]))
        return "\n".join(lines)


def _steady_choices(times: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """One for each size: those with the least sum of the times' logarithms, if every switch costs SWITCH_GAIN."""
    costs = {name: math.log(ms) for name, ms in times[0].items()}
    origins: list[dict[str, str]] = []
    for at_size in times[1:]:
        cheapest = min(costs, key=lambda name: costs[name])
        stays = {name: costs[name] <= costs[cheapest] + SWITCH_GAIN for name in costs}
        origins.append({name: name if stays[name] else cheapest for name in costs})
        costs = {
            name: (costs[name] if stays[name] else costs[cheapest] + SWITCH_GAIN) + math.log(ms)
            for name, ms in at_size.items()
        }
    choices = [min(costs, key=lambda name: costs[name])]
    for origin in reversed(origins):
        choices.insert(0, origin[choices[0]])
    return tuple(choices)


def default_fusion_mb(topology: Topology, backend: str) -> float:
    """Fusion threshold where nothing was measured: two pieces, so that latency stays small beside a bucket's bytes."""
    return min(MOST_FUSED_MB, 2 * AllReduceTable.from_cost_model(topology, backend).chunk_bytes / MIB)


def _chunk_bytes(rows: Sequence[Row], topology: Topology, links: Links) -> int:
    """Every piece pays all latencies between groups: the more groups, the larger the pieces."""

    def pays(row: Row) -> bool:
        phases = phase_costs(row.best, row.num_bytes, topology, links)
        across = next(phase for phase in phases if phase.stage == "scatter")
        return across.latency_s <= LATENCY_SHARE * across.transfer_s

    return next((row.num_bytes for row in rows if row.num_bytes >= CHUNK_BYTES and pays(row)), rows[-1].num_bytes)
