"""The file of an all-reduce table: CSV below a head of comments, and where it is kept between runs."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_fourmin.allreduce.algorithms import ALGORITHMS
from lightning_fourmin.allreduce.table import CHUNK_BYTES, AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.files import cache_folder, write_whole


def cached_table_path(topology: Topology, backend: str) -> Path:
    """Where a measured table of this topology is kept between runs."""
    return cache_folder() / f"{backend}_{topology.key}.csv"


def write_table(table: AllReduceTable, path: Path) -> None:
    """Writes the table, complete or not at all."""
    text = io.StringIO()
    for name in ("topology_key", "backend", "source", "group_size", "chunk_bytes", "made", "fit"):
        if (value := getattr(table, name)) not in (None, ""):
            text.write(f"# {name}: {value}\n")
    writer = csv.writer(text, lineterminator="\n")
    names = list(table.rows[0].milliseconds)
    spreads = [name for name in names if all(name in row.spread_ms for row in table.rows)]
    quartiles = [f"{name}_{end}_ms" for name in spreads for end in ("low", "high")]
    writer.writerow(["bytes", *(f"{name}_ms" for name in names), "choice", *quartiles])
    for row in table.rows:
        times = [row.milliseconds[name] for name in names]
        ends = [ms for name in spreads for ms in row.spread_ms[name]]
        writer.writerow(
            [row.num_bytes, *(f"{t:.6g}" for t in times), table.choose(row.num_bytes), *(f"{t:.6g}" for t in ends)]
        )
    write_whole(path, text.getvalue())


def read_table(path: Path, topology: Topology, backend: str, any_groups: bool = False) -> AllReduceTable:
    """Reads a table and refuses one that was made for another topology or backend.

    `any_groups`: groups that the tuner found better than those of the topology are welcome.
    """
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"table={str(path)!r} is not an all-reduce table ({error}): measure a new one") from error
    except OSError as error:
        raise ValueError(f"table={str(path)!r} cannot be read: {error.strerror}") from error
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    try:
        chunk_bytes = int(head.get("chunk_bytes", CHUNK_BYTES))
        if chunk_bytes < 1:
            raise ValueError("chunk_bytes must be at least 1")
        rows = [_parse(row) for row in csv.DictReader(line for line in lines if not line.startswith("#"))]
        table = AllReduceTable(
            head["topology_key"],
            head["backend"],
            head["source"],
            _checked(rows),
            group_size=int(head["group_size"]) if "group_size" in head else None,
            chunk_bytes=chunk_bytes,
            made=head.get("made", ""),
            fit=head.get("fit", ""),
        )
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
