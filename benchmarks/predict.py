"""Predicted against measured steps on emulated clusters; writes benchmarks/results/predict.md.

Example: sudo .venv/bin/python benchmarks/predict.py            # what is not in the results yet
         sudo .venv/bin/python benchmarks/predict.py --again --only 2x2_200mbit
         .venv/bin/python benchmarks/predict.py --only          # predicts anew from what was measured
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cluster import ClusterUnavailable, EmulatedCluster
from results import read, write

SETTINGS = {
    f"{nodes}x{ranks}_{rate}": (nodes, ranks, rate)
    for nodes, ranks in ((2, 2), (4, 2), (4, 4))
    for rate in ("200mbit", "1gbit")
}


def measure(nodes: int, ranks_per_node: int, rate: str, rounds: int) -> dict[str, Any]:
    with EmulatedCluster(nodes, ranks_per_node, rate) as cluster:
        size = ["--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)]
        script = Path(__file__).with_name("predict_rank.py")
        output = cluster.run(script, ["--rounds", str(rounds), *size], timeout_s=900)
    return dict(json.loads(output.split("RESULT ")[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of settings", choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure settings that are already in the results again")
    arguments = parser.parse_args()
    data: dict[str, dict[str, Any]] = read("predict") or {}
    chosen = SETTINGS if arguments.only is None else arguments.only
    for name in [n for n in chosen if arguments.again or n not in data]:
        print(name, file=sys.stderr, flush=True)
        try:
            data[name] = measure(*SETTINGS[name], arguments.rounds)
        except ClusterUnavailable as error:
            sys.exit(f"no emulated cluster here: {error}")
        write("predict", f"python benchmarks/predict.py --rounds {arguments.rounds}", data, "measured")


if __name__ == "__main__":
    main()
