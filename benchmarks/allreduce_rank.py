"""One rank of the all-reduce benchmark: measures a table, then every algorithm against hybrid with that table."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fourmin.comm.algorithms import ALGORITHMS
from lightning_fourmin.comm.engine import Engine
from lightning_fourmin.comm.groups import ProcessGroups
from lightning_fourmin.comm.table import AllReduceTable, Row
from lightning_fourmin.comm.topology import Topology

SIZES = tuple(4**i * 256 for i in range(9))
TIMEOUT = timedelta(minutes=5)


def timed_ms(all_reduce: Callable[[Tensor], object], data: Tensor) -> float:
    """Milliseconds from a common start until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    all_reduce(data)
    took = torch.tensor([1e3 * (time.perf_counter() - start)])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure(ways: dict[str, Callable[[Tensor], object]], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Times of each way, alternated, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    data = torch.ones(num_bytes // 4)
    for turn in range(rounds + 1):
        for name in list(ways) if turn % 2 else reversed(ways):
            took = timed_ms(ways[name], data.fill_(1.0))
            if turn:
                times[name].append(took)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    world = dist.get_world_size()
    topology = Topology.build([rank // arguments.ranks_per_node for rank in range(world)])
    groups = ProcessGroups.shared(TIMEOUT)
    model = AllReduceTable.from_cost_model(topology, "gloo")

    def engine_for(table: AllReduceTable) -> Engine:
        return Engine(topology, table, groups, torch.device("cpu"), shared_bytes=SIZES[-1])

    def through(engine: Engine) -> Callable[[Tensor], object]:
        return lambda data: engine.submit(data, 0).wait()

    engines = {name: engine_for(model.only(name)) for name in ALGORITHMS}
    ways: dict[str, Callable[[Tensor], object]] = {name: through(engine) for name, engine in engines.items()}
    rows = []
    for num_bytes in SIZES:
        times = measure(ways, num_bytes, max(5, arguments.rounds // 2))
        rows.append(Row(num_bytes, {name: statistics.median(values) for name, values in times.items()}))
    tables = [AllReduceTable(topology.key, "gloo", "measured", tuple(rows))]
    dist.broadcast_object_list(tables, src=0)
    engines["hybrid"] = engine_for(tables[0])
    ways["hybrid"] = through(engines["hybrid"])
    ways["torch"] = lambda data: dist.all_reduce(data.mul_(1 / world))
    result = {str(num_bytes): measure(ways, num_bytes, arguments.rounds) for num_bytes in SIZES}
    for engine in engines.values():
        engine.close()
    if dist.get_rank() == 0:
        choices = {str(n): tables[0].choose(n) for n in SIZES}
        print("RESULT", json.dumps({"times_ms": result, "choices": choices}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
