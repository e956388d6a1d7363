"""One rank of the prediction benchmark: steps, and what the prediction is made from, all with every rank running.

Rank 0 prints the steps of each net with and without communication, layer profiles, the all-reduce table, and the
processor time of all-reduces.
"""

import argparse
import json
import logging
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.measure_table import measure_table, through
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.simulate.layer_profile import measure_profile
from models import NETS
from step_rank import fit_once

PREDICTED = ("fc_heavy", "deep_narrow")
VARIANTS = ("no_comm", "fourmin", "fourmin_fp16")
TIMEOUT = timedelta(minutes=5)
HOST_BYTES = (4096, 1 << 18, 1 << 20, 8 << 20)


def profile(net_name: str) -> dict[str, Any]:
    """Medians of this rank's steps, which begin on all ranks at the same time; gradients in ready order."""
    make, side, batch_size = NETS[net_name]
    torch.manual_seed(1)
    images, labels = torch.randn(batch_size, 3, side, side), torch.arange(batch_size) % 10
    measured = measure_profile(
        make(),
        images,
        lambda scores: nn.functional.cross_entropy(scores, labels),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        repetitions=15,
        before_step=dist.barrier,
    )
    ready_s = {gradient.name: round(gradient.ready_s, 6) for gradient in measured.gradients}
    return {"forward_s": measured.forward_s, "backward_s": measured.backward_s, "ready_s": ready_s}


def compute_s(profile: dict[str, Any]) -> float:
    return float(profile["forward_s"] + profile["backward_s"])


def host_s(engine: Engine, num_bytes: int, rounds: int) -> float:
    """Processor seconds of an all-reduce on the average rank, threads included."""
    way, data = through(engine), torch.ones(num_bytes // 4)
    for _ in range(3):
        way(data)
    dist.barrier()
    start = time.process_time()
    for _ in range(rounds):
        way(data)
    took = torch.tensor([(time.process_time() - start) / rounds])
    dist.all_reduce(took)
    return float(took) / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tune-s", type=float, default=20.0)
    arguments = parser.parse_args()
    nodes, ranks_per_node = arguments.nodes, arguments.ranks_per_node
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    steps: dict[str, dict[str, list[float]]] = {net: {variant: [] for variant in VARIANTS} for net in PREDICTED}
    profiles: dict[str, list[dict[str, Any]]] = {net: [] for net in PREDICTED}
    for turn in range(arguments.rounds):
        for net in PREDICTED:
            for variant in VARIANTS if turn % 2 == 0 else VARIANTS[::-1]:
                steps[net][variant].append(fit_once(variant, net, 8, 3, nodes, ranks_per_node))
            profiles[net].append(profile(net))
    topology = Topology.build([rank // ranks_per_node for rank in range(nodes * ranks_per_node)])
    groups = ProcessGroups.shared(TIMEOUT)
    largest_bytes = 12 << 20
    table = measure_table(topology, groups, torch.device("cpu"), largest_bytes, arguments.tune_s)
    used: dict[str, dict[int, float]] = {}
    for name in table.rows[0].milliseconds:
        plan = CommPlan(topology, table.only(name))
        engine = Engine(plan, groups, torch.device("cpu"), shared_bytes=largest_bytes)
        used[name] = {size: host_s(engine, size, 6) for size in HOST_BYTES}
        engine.close()
    if dist.get_rank() == 0:
        rows = [{"num_bytes": row.num_bytes, "milliseconds": dict(row.milliseconds)} for row in table.rows]
        middle = {net: sorted(rounds, key=compute_s)[len(rounds) // 2] for net, rounds in profiles.items()}
        print("RESULT", json.dumps({"steps_ms": steps, "profiles": middle, "table": rows, "host_s": used}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
