"""Predicted against measured steps on emulated clusters; writes benchmarks/results/predict.md.

Example: sudo .venv/bin/python benchmarks/predict.py            # what is not in the results yet
         sudo .venv/bin/python benchmarks/predict.py --again --only 2x2_200mbit
         .venv/bin/python benchmarks/predict.py --only          # predicts anew from what was measured
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from cluster import ClusterUnavailable, EmulatedCluster
from lightning_fourmin.allreduce.cost import Link
from lightning_fourmin.allreduce.fit_links import fit_links
from lightning_fourmin.allreduce.plan import CommOptions, CommPlan
from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.simulate.layer_profile import Gradient, Profile
from lightning_fourmin.simulate.step import CommCosts, simulate
from models import NETS
from results import read, table, write
from stats import estimate

MEDIAN_GOAL, WORST_GOAL = 0.10, 0.25
WIRES = {"fourmin": "fp32", "fourmin_fp16": "fp16"}
"""Variants of the strategy, each with its wire."""

SETTINGS = {
    f"{nodes}x{ranks}_{rate}": (nodes, ranks, rate)
    for nodes, ranks in ((2, 2), (4, 2), (4, 4))
    for rate in ("200mbit", "1gbit")
}


def measure(nodes: int, ranks_per_node: int, rate: str, rounds: int) -> dict[str, Any]:
    with EmulatedCluster(nodes, ranks_per_node, rate) as cluster, TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # tables of earlier runs stay out
        size = ["--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)]
        script = Path(__file__).with_name("predict_rank.py")
        output = cluster.run(script, ["--rounds", str(rounds), *size], timeout_s=900)
    return dict(json.loads(output.split("RESULT ")[1]))


def predict(name: str, data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of each net and variant."""
    nodes, ranks_per_node, _ = SETTINGS[name]
    topology = Topology.build([rank // ranks_per_node for rank in range(nodes * ranks_per_node)])
    rows = tuple(Row(row["num_bytes"], row["milliseconds"]) for row in data["table"])
    measured = AllReduceTable(topology.key, "gloo", "measured", rows)
    # The measured steps had no table: the strategy chose by the cost model with its stated links.
    chosen = AllReduceTable.from_cost_model(topology, "gloo")
    links, host = fit_links(measured, topology).links, fit_host(data["host_s"][chosen.choose(1 << 20)], topology)
    steps = {}
    for net, taken in data["steps_ms"].items():
        parameters = list(NETS[net][0]().named_parameters())
        profile = whole_step(data["profiles"][net], dict(parameters), 1e-3 * statistics.median(taken["no_comm"]))
        steps[net] = {
            variant: 1e3 * simulate(profile, plan_of(parameters, topology, wire), CommCosts(links, host)).step_s
            for variant, wire in WIRES.items()
        }
    return steps


def plan_of(parameters: list[tuple[str, nn.Parameter]], topology: Topology, wire: str) -> CommPlan:
    """What the strategy decided in the measured steps."""
    return CommPlan.decide(CommOptions(wire_dtype=wire), topology, "gloo", parameters=parameters)


def whole_step(measured: dict[str, Any], parameters: dict[str, nn.Parameter], no_comm_s: float) -> Profile:
    """A measured profile; what a step without communication takes beyond forward and backward is its update."""
    gradients = tuple(Gradient(name, parameters[name].nbytes, at_s) for name, at_s in measured["ready_s"].items())
    forward_s, backward_s = measured["forward_s"], measured["backward_s"]
    update_s = max(0.0, no_comm_s - forward_s - backward_s)
    return Profile(gradients, forward_s, backward_s, update_s, 1, "measured with all ranks running")


def fit_host(used: dict[str, float], topology: Topology) -> Link:
    """What an all-reduce costs the cores, which all ranks share; from the smallest and the largest size."""
    sizes = sorted(used, key=int)
    ranks_a_core = topology.world_size / (os.cpu_count() or 1)
    small_s, large_s = (used[size] * ranks_a_core for size in (sizes[0], sizes[-1]))
    return Link(small_s, max(0.0, large_s - small_s) / (int(sizes[-1]) - int(sizes[0])))


def report(data: dict[str, dict[str, Any]]) -> str:
    rows, errors = [], []
    for name, measured in ((name, data[name]) for name in SETTINGS if name in data):
        predicted = predict(name, measured)
        for net, steps in measured["steps_ms"].items():
            for variant in WIRES:
                there, ours = estimate(steps[variant]), predicted[net][variant]
                error = ours / there.median - 1
                judged = not name.startswith("4x4")
                if judged:
                    errors.append(abs(error))
                no_comm = statistics.median(steps["no_comm"])
                cells = [name, net, variant, str(len(steps[variant])), f"{no_comm:.0f}", str(there), f"{ours:.0f}"]
                rows.append([*cells, f"{error:+.1%}" + ("" if judged else " (not judged)")])
    head = ("setting", "net", "variant", "rounds", "no comm. ms", "measured ms", "predicted ms", "error")
    if not errors:
        return table(head, rows)
    middle, worst = statistics.median(errors), max(errors)
    told = (
        f"Median error {middle:.1%} (goal {MEDIAN_GOAL:.0%}: {'met' if middle <= MEDIAN_GOAL else 'MISSED'}), worst "
        f"{worst:.1%} (goal {WORST_GOAL:.0%}: {'met' if worst <= WORST_GOAL else 'MISSED'})."
    )
    return f"{table(head, rows)}\n\n{told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of settings", choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure settings that are already in the results again")
    arguments = parser.parse_args()
    data: dict[str, dict[str, Any]] = read("predict") or {}
    chosen = SETTINGS if arguments.only is None else arguments.only
    command = f"python benchmarks/predict.py --rounds {arguments.rounds}"
    todo = [name for name in chosen if arguments.again or name not in data]
    for name in todo:
        print(name, file=sys.stderr, flush=True)
        try:
            data[name] = measure(*SETTINGS[name], arguments.rounds)
        except ClusterUnavailable as error:
            sys.exit(f"no emulated cluster here: {error}")
        write("predict", command, data, report(data))
    if data and not todo:
        write("predict", command, data, report(data))


if __name__ == "__main__":
    main()
