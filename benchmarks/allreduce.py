"""All-reduce on an emulated cluster: each algorithm, hybrid, and torch's flat all-reduce, 256 B to 16 MB.

Example: sudo .venv/bin/python benchmarks/allreduce.py --nodes 4 --ranks-per-node 4 --rate 1gbit
"""

import argparse
import json
import sys
from pathlib import Path

from cluster import ClusterUnavailable, EmulatedCluster
from results import table, write
from stats import estimate, paired_ratio

SMALL_BYTES = 64 * 1024
SMALL_GOAL, BEST_GOAL = 3.0, 0.95
SINGLE = ("ring", "hierarchical", "torus")


def report(result: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """A row a size: medians, and hybrid against torch's and against the best single algorithm."""
    rows = []
    for size, times in result["times_ms"].items():
        medians = {name: estimate(values).median for name, values in times.items()}
        best = min(SINGLE, key=lambda name: medians[name])
        over_torch, over_best = (paired_ratio(times[name], times["hybrid"]) for name in ("torch", best))
        small = int(size) <= SMALL_BYTES
        met = over_best.meets(BEST_GOAL) and (not small or over_torch.meets(SMALL_GOAL))
        cells = [f"{int(size):,d}", *(f"{medians[name]:.1f}" for name in (*SINGLE, "hybrid", "torch"))]
        rows.append([*cells, result["choices"][size], str(over_torch), f"{over_best} ({best})", "yes" if met else "NO"])
    names = [*(f"{name} ms" for name in SINGLE), "hybrid ms", "torch flat ms", "hybrid takes"]
    head = ["bytes", *names, f"x torch (goal {SMALL_GOAL:g} to 64 KB)", f"x best (goal {BEST_GOAL:g})", "goals met"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each node's link, as tc writes it")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each algorithm and size")
    arguments = parser.parse_args()
    nodes, ranks, rate = arguments.nodes, arguments.ranks_per_node, arguments.rate
    try:
        with EmulatedCluster(nodes, ranks, rate) as cluster:
            script = Path(__file__).with_name("allreduce_rank.py")
            output = cluster.run(
                script, ["--ranks-per-node", str(ranks), "--rounds", str(arguments.rounds)], timeout_s=1800
            )
    except ClusterUnavailable as error:
        sys.exit(f"no emulated cluster here: {error}")
    result = json.loads(output.split("RESULT ")[1])
    command = f"benchmarks/allreduce.py --nodes {nodes} --ranks-per-node {ranks} --rate {rate}"
    write(f"allreduce_{nodes}x{ranks}_{rate}", f"python {command} --rounds {arguments.rounds}", result, report(result))


if __name__ == "__main__":
    main()
