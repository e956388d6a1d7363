"""The table that decides: message size -> algorithm, with the milliseconds behind each choice; and its CSV file.

    bytes      ring   hierarchical   torus   choice
    1,024       4.0            1.0     2.0   hierarchical
    1,048,576   9.0           12.0     8.0   torus
    8,388,608  40.0           90.0    50.0   ring

A table is computed from the cost model, or measured by `fourmin tune` and kept in a file: a CSV below a head of
comments, which says what topology and backend the table is for, and what else was found best there.
"""

import csv
import io
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_fourmin.allreduce.algorithms import ALGORITHMS, Hierarchical, Ring, algorithm_of, usable_algorithms
from lightning_fourmin.allreduce.buckets import MIB
from lightning_fourmin.allreduce.cost import Links, default_links
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.files import cache_folder, write_whole
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
"""The smallest pieces that the cost model cuts buckets into; the largest have the last of SIZES."""
MOST_FUSED_MB = 32.0
"""The largest default threshold: with larger buckets, too little of backward would be left to hide them behind."""
SWITCH_GAIN = 0.25
"""What another algorithm must save, as shares of the time at each size added up, before a measured table takes it:
small gains of an all-reduce alone were not seen again in training."""
LATENCY_SHARE = 0.5
"""The share that latency may add to the time that the bytes of a piece take between groups."""


@dataclass(frozen=True)
class Row:
    """Expected milliseconds of each algorithm at one size."""

    num_bytes: int
    milliseconds: Mapping[str, float]
    spread_ms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lower and upper quartile of what was measured; empty where nothing was."""

    def only(self, algorithm: str) -> "Row":
        """The row with one algorithm."""
        spread = {name: spread for name, spread in self.spread_ms.items() if name == algorithm}
        return Row(self.num_bytes, {algorithm: self.milliseconds[algorithm]}, spread)

    @property
    def best(self) -> str:
        """The algorithm with the fewest milliseconds; of equal ones the first."""
        return min(self.milliseconds, key=self.milliseconds.__getitem__)


@dataclass(frozen=True)
class AllReduceTable:
    """Rows by rising size for one topology and backend.

    All fields but `rows` and the user's `switch_bytes` are also in the head of a table's file, in this order.
    """

    topology_key: str
    backend: str
    source: str
    """Where the milliseconds come from, for people: `cost model` or `measured ...`."""
    rows: tuple[Row, ...]
    switch_bytes: int | None = None
    """The user's switch size: hierarchical at or below it, ring above."""
    group_size: int | None = None
    """The ranks of a group that the tuner found best; None: the groups are the nodes."""
    chunk_bytes: int = CHUNK_BYTES
    """A bucket with more bytes on the wire goes in pieces (see `num_pieces`)."""
    fusion_mb: float | None = None
    """The fusion threshold with which steps of a net were the fastest (`fourmin tune model=...`)."""
    algorithm: str | None = None
    """The algorithm with which, used for all sizes, steps of a net were the fastest."""
    made: str = ""
    """The date of the measurement, and the versions of the packages that made it."""
    fit: str = ""
    """The links that fit the times, and how well, for people."""

    def choose(self, num_bytes: int) -> str:
        """The algorithm of the rows around this size; where they differ, the one with the fewest expected ms."""
        if self.switch_bytes is not None:
            return Hierarchical.name if num_bytes <= self.switch_bytes else Ring.name
        if self.algorithm is not None:
            return self.algorithm
        above = min(bisect_left(self.rows, num_bytes, key=lambda row: row.num_bytes), len(self.rows) - 1)
        choices = {self._choices[above]}
        if above and num_bytes < self.rows[above].num_bytes:
            choices.add(self._choices[above - 1])
        if len(choices) == 1:
            return choices.pop()
        return min(self.algorithms, key=self.expected_ms(num_bytes).__getitem__)

    @cached_property
    def _choices(self) -> tuple[str, ...]:
        """The choice at each row: the fastest, but a measured table switches only where the gain is no accident."""
        if any(row.spread_ms for row in self.rows):
            return _steady_choices([row.milliseconds for row in self.rows])
        return tuple(row.best for row in self.rows)

    def num_pieces(self, algorithm: str, num_bytes: int) -> int:
        """The number of pieces of nearly the same size that a bucket is cut into."""
        return max(1, -(-num_bytes // self.chunk_bytes)) if algorithm_of(algorithm).in_pieces else 1

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
            return (Ring.name, Hierarchical.name)
        if self.algorithm is not None:
            return (self.algorithm,)
        return tuple(name for name in self.rows[0].milliseconds if name in self._choices)

    def with_switch(self, switch_bytes: int) -> "AllReduceTable":
        """The paper's hybrid with a given switch size."""
        return replace(self, switch_bytes=switch_bytes)

    def only(self, algorithm: str) -> "AllReduceTable":
        """The same table with one algorithm to choose."""
        if algorithm not in self.rows[0].milliseconds:
            known = ", ".join(self.rows[0].milliseconds)
            hint = algorithm_of(algorithm).needs or "measure one that has it"
            raise ValueError(
                f"algorithm={algorithm!r} is not in the table of {self.topology_key} ({known}): {hint}, or use "
                "algorithm='hybrid'"
            )
        return replace(self, rows=tuple(row.only(algorithm) for row in self.rows), algorithm=None)

    def groups_of(self, topology: Topology) -> Topology:
        """The ranks in the groups that the table was measured with."""
        return topology if self.group_size is None else topology.with_groups_of(self.group_size)

    @classmethod
    def from_cost_model(
        cls, topology: Topology, backend: str, links: Links | None = None, algorithms: Sequence[str] | None = None
    ) -> "AllReduceTable":
        """The table that the cost model computes for some algorithms on some links.

        The default `links` are the stated ones of the backend, the default `algorithms` all that the topology can run.
        """
        links = links or default_links(backend)
        names = algorithms or usable_algorithms(topology)

        def milliseconds(algorithm: str, num_bytes: int) -> float:
            # Sums in another order differ in the last digits: that must not decide between algorithms.
            return float(f"{1e3 * algorithm_of(algorithm).seconds(num_bytes, topology, links):.9g}")

        rows = [Row(n, {name: milliseconds(name, n) for name in names}) for n in SIZES]
        chunk_bytes = _chunk_bytes(rows, topology, links)
        return cls(topology.key, backend, "cost model", tuple(rows), chunk_bytes=chunk_bytes)

    def switch_points(self) -> list[tuple[int, str, str]]:
        """Sizes from which on the choice is another, each with the algorithms below and above."""
        if self.switch_bytes is not None:
            return [(self.switch_bytes + 1, Hierarchical.name, Ring.name)]
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
            lines.append(f"switch_mb given: {Hierarchical.name} up to {self.switch_bytes:,d} bytes, {Ring.name} above")
        lines.append("  ".join(["       bytes", *(f"{name + ' ms':>16}" for name in names), "choice"]))
        for row in self.rows:
            times = (f"{row.milliseconds[name]:16.3f}" for name in names)
            lines.append("  ".join([f"{row.num_bytes:12,d}", *times, self.choose(row.num_bytes)]))
        return "\n".join(lines)


def _steady_choices(times: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """A choice for each size: those with the least sum of the times' logarithms, if every switch costs SWITCH_GAIN.

    This is a shortest path, found size by size: `costs` has the cheapest way to each algorithm at the size that was
    reached, `origins` the algorithm from which it came there.
    """
    costs = {name: math.log(ms) for name, ms in times[0].items()}
    origins: list[dict[str, str]] = []
    for at_size in times[1:]:
        cheapest = min(costs, key=costs.__getitem__)
        switched = costs[cheapest] + SWITCH_GAIN
        origins.append({name: name if cost <= switched else cheapest for name, cost in costs.items()})
        costs = {name: min(costs[name], switched) + math.log(ms) for name, ms in at_size.items()}
    choices = [min(costs, key=costs.__getitem__)]
    for origin in reversed(origins):
        choices.insert(0, origin[choices[0]])
    return tuple(choices)


def default_fusion_mb(topology: Topology, backend: str) -> float:
    """The fusion threshold where nothing was measured: two pieces, so that latency is small beside a bucket's bytes."""
    return min(MOST_FUSED_MB, 2 * AllReduceTable.from_cost_model(topology, backend).chunk_bytes / MIB)


def _chunk_bytes(rows: Sequence[Row], topology: Topology, links: Links) -> int:
    """The smallest pieces for which latency is small: every piece pays all latencies between groups.

    So the more groups there are, the larger the pieces.
    """

    def pays(row: Row) -> bool:
        phases = algorithm_of(row.best).costs(row.num_bytes, topology, links)
        across = next(phase for phase in phases if phase.stage == "scatter")
        return across.latency_s <= LATENCY_SHARE * across.transfer_s

    return next((row.num_bytes for row in rows if row.num_bytes >= CHUNK_BYTES and pays(row)), rows[-1].num_bytes)


def cached_table_path(topology: Topology, backend: str) -> Path:
    """Where a measured table of this topology is kept between runs."""
    return cache_folder() / f"{backend}_{topology.key}.csv"


def write_table(table: AllReduceTable, path: Path) -> None:
    """Writes the table, complete or not at all; the choice in each line is for people and is not read back."""
    text = io.StringIO()
    for name in (one.name for one in fields(table)):
        if name not in ("rows", "switch_bytes") and (value := getattr(table, name)) not in (None, ""):
            text.write(f"# {name}: {value}\n")
    writer = csv.writer(text, lineterminator="\n")
    names = list(table.rows[0].milliseconds)
    spreads = [name for name in names if all(name in row.spread_ms for row in table.rows)]
    quartiles = [f"{name}_{end}_ms" for name in spreads for end in ("low", "high")]
    writer.writerow(["bytes", *(f"{name}_ms" for name in names), "choice", *quartiles])
    for row in table.rows:
        times = [f"{row.milliseconds[name]:.6g}" for name in names]
        ends = [f"{ms:.6g}" for name in spreads for ms in row.spread_ms[name]]
        writer.writerow([row.num_bytes, *times, table.choose(row.num_bytes), *ends])
    write_whole(path, text.getvalue())


def read_table(path: Path, topology: Topology, backend: str, any_groups: bool = False) -> AllReduceTable:
    """Reads a table and refuses one that was made for another topology or backend.

    With `any_groups` the table may bring groups that the tuner found better than those of the topology.
    """
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"table={str(path)!r} is not an all-reduce table ({error}): measure a new one") from error
    except OSError as error:
        raise ValueError(f"table={str(path)!r} cannot be read: {error.strerror}") from error
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    try:
        # A table that an older version wrote may lack any of these.
        found: dict[str, Any] = {name: head[name] for name in ("algorithm", "made", "fit") if name in head}
        for name, number in (("group_size", int), ("chunk_bytes", int), ("fusion_mb", float)):
            if name in head:
                found[name] = number(head[name])
        if found.get("chunk_bytes", CHUNK_BYTES) < 1:
            raise ValueError("chunk_bytes must be at least 1")
        if found.get("algorithm", Ring.name) not in ALGORITHMS or not found.get("fusion_mb", 1.0) > 0:
            raise ValueError("its algorithm is unknown or its fusion_mb not above 0")
        rows = [_parse(row) for row in csv.DictReader(line for line in lines if not line.startswith("#"))]
        table = AllReduceTable(head["topology_key"], head["backend"], head["source"], _checked(rows), **found)
    except (AttributeError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise ValueError(
            f"table={str(path)!r} is not an all-reduce table ({type(error).__name__}: {error}): measure a new one"
        ) from error
    if any_groups:
        topology = table.groups_of(topology)
    for name, here in (("topology_key", topology.key), ("backend", backend)):
        there = getattr(table, name)
        if there != here:
            raise ValueError(
                f"table={str(path)!r} was measured for {name} {there!r}, but this run has {here!r}: "
                "measure a table here, or leave table out to use the cost model"
            )
    return table


def _parse(row: Mapping[str, str]) -> Row:
    times = {name.removesuffix("_ms"): float(text) for name, text in row.items() if name.endswith("_ms")}
    ends = {name: times.pop(name) for name in list(times) if name.endswith(("_low", "_high"))}
    spread = {name: (ends[f"{name}_low"], ends[f"{name}_high"]) for name in times if f"{name}_low" in ends}
    return Row(int(row["bytes"]), times, spread)


def _checked(rows: Sequence[Row]) -> tuple[Row, ...]:
    if not rows:
        raise ValueError("it has no rows")
    names = set(rows[0].milliseconds)
    if not names or not names <= set(ALGORITHMS):
        raise ValueError(f"its algorithms are {sorted(names)}")
    if rows[0].num_bytes < 1 or [row.num_bytes for row in rows] != sorted({row.num_bytes for row in rows}):
        raise ValueError("its sizes do not rise from 1 byte or more")
    times = [ms for row in rows for ms in row.milliseconds.values()]
    if any(set(row.milliseconds) != names for row in rows) or not all(0 < ms < math.inf for ms in times):
        raise ValueError("every row needs a positive time for every algorithm")
    return tuple(rows)
