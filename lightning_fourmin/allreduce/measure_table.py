"""Measures a table, as `table="auto"` and `fourmin tune` do, and chooses the table of a run.

Algorithms, group sizes and chunk sizes are timed at rising sizes, alternated, within a budget of time:

    budget  [ groups | chunks | rising sizes once, as far as they fit | rounds over all sizes, forth and back ... ]

Rank 0's clock decides for all ranks, and all ranks get rank 0's table.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fourmin.allreduce.algorithms import ALGORITHMS, usable_algorithms
from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.fit_links import fit_links
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups, broadcast_object, from_rank_0
from lightning_fourmin.allreduce.table import (
    AllReduceTable,
    Row,
    cached_table_path,
    read_table,
    sizes_up_to,
    write_table,
)
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.text import dtype_name

AUTO_BUDGET_S = 5.0
"""The time that `table="auto"` may take."""
SEARCH_BUDGET_S = 15.0
"""Below this budget groups are the nodes and chunks have their default size."""
SEARCH_SHARE = 0.2
"""Share of the budget for groups, and again for chunks."""
SEARCH_BYTES = (64 * 1024, 4 * 1024 * 1024)
"""Sizes at which groups and chunks are compared."""
ROUND_MS, MAX_REPEATS = 50.0, 8
"""A round measures small sizes several times: they take little of the budget, and vary most."""
CLEARLY = 0.8
"""Another group or chunk size than the default must take at most this share of its time. Chunks that saved less in an
all-reduce alone made whole steps slower, where cores are busy."""

K = TypeVar("K", bound=Hashable)
Way = Callable[[torch.Tensor], object]
"""A function of a tensor that is to be timed."""
Progress = Callable[[float], object]
"""A function that is called with the share of the budget that is spent."""


def timed_ms(way: Way, data: torch.Tensor) -> float:
    """Milliseconds from a common start until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    way(data)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    took = torch.tensor([1e3 * (time.perf_counter() - start)], device=data.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def through(engine: Engine) -> Way:
    """An all-reduce through an engine, in the form that `timed_ms` times."""

    def way(data: torch.Tensor) -> None:
        engine.submit(data, 0).wait()
        # An all-reduce that failed is over at once, and would be taken for the fastest.
        engine.raise_error()

    return way


def measure_table(
    topology: Topology,
    groups: ProcessGroups,
    device: torch.device,
    largest_bytes: int,
    budget_s: float,
    wire_dtype: torch.dtype | None = None,
    search: bool = False,
    progress: Progress = lambda share: None,
) -> AllReduceTable:
    """A table of medians, the same on all ranks; sizes that the budget does not reach are left out.

    Gradients are FP32, sizes are those on the wire. With `search` it also looks for better groups than the nodes and
    for the best chunks, if the budget allows. A collective call.
    """
    sizes = sizes_up_to(largest_bytes)
    measurement = _Measurement(topology, groups, device, sizes, budget_s, wire_dtype or torch.float32, progress)
    return measurement.measure(search)


@dataclass(frozen=True)
class _Measurement:
    """The measurement of one table, in the main thread of every rank.

    All methods that use an engine or the budget are collective calls; rank 0's clock decides when to stop.
    """

    topology: Topology
    groups: ProcessGroups
    device: torch.device
    sizes: list[int]
    budget_s: float
    wire_dtype: torch.dtype
    progress: Progress
    start_s: float = field(default_factory=time.monotonic)

    def measure(self, search: bool) -> AllReduceTable:
        topology, share = self.topology, 0.0
        chunk_bytes = _default_table(topology).chunk_bytes
        if search and self.budget_s >= SEARCH_BUDGET_S:
            topology = self._best_groups(SEARCH_SHARE)
            chunk_bytes = self._best_chunks(topology, 2 * SEARCH_SHARE)
            share = 2 * SEARCH_SHARE
        table = self._measure_sizes(topology, chunk_bytes, share)
        if topology is not self.topology:
            table = replace(table, group_size=topology.largest_group)
        return broadcast_object(replace(table, fit=str(fit_links(table, topology)), made=_made()))

    def _best_groups(self, until: float) -> Topology:
        topologies = {len(t.groups): t for t in (self.topology, *_other_groups(self.topology))}
        ways = {
            (number, name): (topology, name, _default_table(topology).chunk_bytes)
            for number, topology in topologies.items()
            for name in usable_algorithms(topology)
            if ALGORITHMS[name].meets_in_groups
        }
        times = self._rounds(ways, self._search_sizes(), until)
        scores: dict[int, float] = {}
        for number in topologies:
            # The best algorithm at each size; logarithms, so that small sizes count as much as large ones.
            best = [min(ms for (n, _), ms in at_size.items() if n == number) for at_size in times]
            scores[number] = statistics.fmean(map(math.log, best))
        return topologies[broadcast_object(_clearly_best(scores, default=len(self.topology.groups)))]

    def _best_chunks(self, topology: Topology, until: float) -> int:
        default = _default_table(topology).chunk_bytes
        chunks = (default // 4, default, 4 * default)
        sizes = [size for size in self._search_sizes() if size > chunks[0]]
        if not sizes or topology.world_size == 1:
            return default
        name = usable_algorithms(topology)[-1]
        (times,) = self._rounds({chunk: (topology, name, chunk) for chunk in chunks}, sizes[-1:], until)
        return broadcast_object(_clearly_best({k: math.log(ms) for k, ms in times.items()}, default))

    def _search_sizes(self) -> list[int]:
        return sorted({min(size, self.sizes[-1]) for size in SEARCH_BYTES})

    def _rounds(
        self, ways: Mapping[K, tuple[Topology, str, int]], sizes: list[int], until: float
    ) -> list[dict[K, float]]:
        """The median of each way at each size, from rounds until a share of the budget is spent; two at least."""
        times: list[dict[K, list[float]]] = [{key: [] for key in ways} for _ in sizes]
        with self._engines(ways, shared_bytes=sizes[-1]) as engines:
            turn = 0
            while turn < 3 or not self._over(until):
                for size, at_size in zip(sizes, times, strict=True):
                    for key, ms in self._one_round(engines, size, turn).items():
                        if turn:  # the first touches fresh memory
                            at_size[key].append(ms)
                turn += 1
        return [_medians(at_size) for at_size in times]

    def _measure_sizes(self, topology: Topology, chunk_bytes: int, share: float) -> AllReduceTable:
        times: dict[int, dict[str, list[float]]] = {}
        ways = {name: (topology, name, chunk_bytes) for name in usable_algorithms(topology)}
        with self._engines(ways, shared_bytes=self.sizes[-1]) as engines:
            repeats: dict[int, int] = {}
            for size in self.sizes:  # warms up both halves of shared memory, and finds how far the budget reaches
                self._one_round(engines, size, 0)
                slowest_ms = max(self._one_round(engines, size, 1).values())
                times[size] = {name: [] for name in engines}
                repeats[size] = max(1, min(MAX_REPEATS, int(ROUND_MS / slowest_ms)))
                if self._over((1 + share) / 2):
                    break
            turn = 0
            while not turn or not self._over(1.0):
                for size, by_name in times.items():
                    for repeat in range(repeats[size]):
                        for name, ms in self._one_round(engines, size, turn + repeat).items():
                            by_name[name].append(ms)
                turn += 1
        rows = [Row(size, _medians(by_name), _quartiles(by_name)) for size, by_name in times.items()]
        source = f"measured, n={turn}" + (f" to {turn * max(repeats.values())}" if max(repeats.values()) > 1 else "")
        if self.wire_dtype is not torch.float32:
            source += f", {dtype_name(self.wire_dtype)} wire"
        return AllReduceTable(topology.key, dist.get_backend(), source, tuple(rows), chunk_bytes=chunk_bytes)

    @contextmanager
    def _engines(self, ways: Mapping[K, tuple[Topology, str, int]], shared_bytes: int) -> Iterator[dict[K, Engine]]:
        """An engine for each way: its topology, algorithm and chunk size. All ranks make them in the same order."""
        engines: dict[K, Engine] = {}
        with ExitStack() as stack:
            for key, (topology, name, chunk_bytes) in ways.items():
                table = replace(_default_table(topology).only(name), chunk_bytes=chunk_bytes)
                plan = CommPlan(topology, table, self.wire_dtype)
                engine = Engine(plan, self.groups, self.device, shared_bytes=shared_bytes)
                engines[key] = stack.enter_context(closing(engine))
            yield engines

    def _one_round(self, engines: Mapping[K, Engine], size: int, turn: int) -> dict[K, float]:
        data = torch.ones(size // self.wire_dtype.itemsize, device=self.device)
        # Forth and back, so that no way always comes after the same other one.
        keys = list(engines)
        return {key: timed_ms(through(engines[key]), data) for key in (reversed(keys) if turn % 2 else keys)}

    def _over(self, share: float) -> bool:
        spent = (time.monotonic() - self.start_s) / self.budget_s
        self.progress(min(spent, 1.0))
        return broadcast_object(spent) >= share


def _other_groups(topology: Topology) -> list[Topology]:
    """The same ranks in groups of half a node and of two nodes, where nodes are equal."""
    size, sizes = topology.largest_group, []
    if topology.equal_groups and size % 2 == 0:
        sizes.append(size // 2)
    if topology.equal_groups and topology.num_nodes > 2 and topology.num_nodes % 2 == 0:
        sizes.append(2 * size)
    return [topology.with_groups_of(size) for size in sizes]


def _default_table(topology: Topology) -> AllReduceTable:
    return AllReduceTable.from_cost_model(topology, dist.get_backend())


def _clearly_best(scores: Mapping[int, float], default: int) -> int:
    """The key with the lowest score (a logarithm of time), or the default if it is about as good."""
    best = min(scores, key=lambda key: scores[key])
    return best if scores[best] < scores[default] + math.log(CLEARLY) else default


def _medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    return {key: statistics.median(ms) for key, ms in times.items()}


def _quartiles(times: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    ends = {}
    for name, ms in times.items():
        quartiles = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [*ms, *ms, *ms]
        ends[name] = (quartiles[0], quartiles[2])
    return ends


def _made() -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("lightning-fourmin", "torch"))
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {versions}"


def choose_table(
    asked: str | Path | None,
    topology: Topology,
    groups: ProcessGroups,
    device: torch.device,
    largest_bytes: int,
    wire_dtype: torch.dtype | None = None,
    any_groups: bool = False,
) -> AllReduceTable:
    """The table of a run: the file that was asked for, the cached one, one measured now, or the cost model's.

    A collective call: rank 0 reads or computes the table, and all ranks get that one, or rank 0's error. With
    `any_groups` a table may bring groups that its tuner found better than those of the topology.
    """
    table = from_rank_0(lambda: _find(asked, topology, any_groups))
    if table is None:
        rank_zero_info(f"fourmin: measuring the all-reduce for {AUTO_BUDGET_S:g} s (table='auto', kept for later runs)")
        table = measure_table(topology, groups, device, largest_bytes, AUTO_BUDGET_S, wire_dtype)
        if dist.get_rank() == 0:
            path = cached_table_path(topology, table.backend)
            try:
                write_table(table, path)
            except OSError as error:
                rank_zero_warn(f"the table is not kept for later runs: {path}: {error.strerror}")
    return table


def _find(asked: str | Path | None, topology: Topology, any_groups: bool) -> AllReduceTable | None:
    """The table that the user asked for; None if it has to be measured."""
    backend = dist.get_backend()
    path = Path(asked) if asked is not None and asked != "auto" else cached_table_path(topology, backend)
    # Unlike `Path.exists`, `os.path.exists` answers False where the cache folder may not be looked into.
    if asked not in (None, "auto") or os.path.exists(path):
        return read_table(path, topology, backend, any_groups)
    return None if asked == "auto" else AllReduceTable.from_cost_model(topology, backend)
