"""Measures the table: every algorithm at rising sizes, alternated, within a budget of time that all ranks share."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_fourmin.comm.algorithms import usable_algorithms
from lightning_fourmin.comm.engine import Engine
from lightning_fourmin.comm.groups import ProcessGroups
from lightning_fourmin.comm.table import AllReduceTable, Row, sizes_up_to
from lightning_fourmin.comm.topology import Topology

Way = Callable[[torch.Tensor], object]


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
    """An all-reduce through an engine, as `timed_ms` wants it."""
    return lambda data: engine.submit(data, 0).wait()


def measure_table(
    topology: Topology, groups: ProcessGroups, device: torch.device, largest_bytes: int, budget_s: float
) -> AllReduceTable:
    """A table of medians; sizes that the budget does not reach are left out. All ranks get rank 0's."""
    table = AllReduceTable.from_cost_model(topology, dist.get_backend())
    sizes = sizes_up_to(largest_bytes)
    engines = {
        name: Engine(topology, table.only(name), groups, device, shared_bytes=sizes[-1])
        for name in usable_algorithms(topology)
    }
    times: dict[int, dict[str, list[float]]] = {}

    def one_round(size: int) -> dict[str, float]:
        data = torch.ones(size // 4, device=device)
        return {name: timed_ms(through(engine), data) for name, engine in engines.items()}

    deadline = time.monotonic() + budget_s / 2
    for size in sizes:  # warms up both halves of shared memory, and finds how far the budget reaches
        one_round(size)
        one_round(size)
        times[size] = {name: [] for name in engines}
        if _over(deadline, device):
            break
    deadline += budget_s / 2
    while True:
        for size, by_name in times.items():
            for name, took in one_round(size).items():
                by_name[name].append(took)
        if _over(deadline, device):
            break
    for engine in engines.values():
        engine.close()
    rows = [Row(size, {name: statistics.median(took) for name, took in row.items()}) for size, row in times.items()]
    found = [AllReduceTable(topology.key, dist.get_backend(), f"measured, n={len(times[256]['ring'])}", tuple(rows))]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _over(deadline: float, device: torch.device) -> bool:
    """Rank 0's clock decides for all."""
    left = torch.tensor([deadline - time.monotonic()], device=device)
    dist.broadcast(left, src=0)
    return float(left) <= 0
