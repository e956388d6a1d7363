"""One rank of the all-reduce benchmark: measures a table, then every algorithm against hybrid with that table."""

import argparse
import json
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_fourmin.allreduce.algorithms import ALGORITHMS
from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.measure_table import Way, measure_table, through, timed_ms
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable, sizes_up_to
from lightning_fourmin.allreduce.topology import Topology

SIZES = sizes_up_to(16 * 1024 * 1024)
TIMEOUT = timedelta(minutes=5)
WARMUP_ROUNDS = 3


def measure(ways: dict[str, Way], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Times of each way, alternated, after rounds that do not count: the first ones touch fresh memory."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    data = torch.ones(num_bytes // 4)
    for turn in range(-WARMUP_ROUNDS, rounds):
        for name in list(ways) if turn % 2 else reversed(ways):
            took = timed_ms(ways[name], data.fill_(1.0))
            if turn >= 0:
                times[name].append(took)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tune-s", type=float, default=30.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    world = dist.get_world_size()
    topology = Topology.build([rank // arguments.ranks_per_node for rank in range(world)])
    groups = ProcessGroups.shared(TIMEOUT)

    table = measure_table(topology, groups, torch.device("cpu"), SIZES[-1], budget_s=arguments.tune_s)

    def engine_for(table: AllReduceTable) -> Engine:
        return Engine(CommPlan(topology, table), groups, torch.device("cpu"), shared_bytes=SIZES[-1])

    engines = {name: engine_for(table.only(name)) for name in ALGORITHMS}
    engines["hybrid"] = engine_for(table)
    ways: dict[str, Way] = {name: through(engine) for name, engine in engines.items()}
    ways["torch"] = lambda data: dist.all_reduce(data.mul_(1 / world))
    result = {str(num_bytes): measure(ways, num_bytes, arguments.rounds) for num_bytes in SIZES}
    for engine in engines.values():
        engine.close()
    if dist.get_rank() == 0:
        choices = {str(n): table.choose(n) for n in SIZES}
        print("RESULT", json.dumps({"times_ms": result, "choices": choices}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
