"""The tuner on emulated clusters: tuned against untuned defaults, each single algorithm, ddp and fixed thresholds.

Example: sudo .venv/bin/python benchmarks/tune.py            # what is not in the results yet; all: an hour
         sudo .venv/bin/python benchmarks/tune.py --again --only 2x2_200mbit
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import ClusterUnavailable, EmulatedCluster
from results import read, table, write
from stats import estimate, paired_ratio

SINGLE = ("ring", "hierarchical", "torus")
NET = "fc_heavy"


@dataclass(frozen=True)
class Setting:
    """A cluster."""

    nodes: int
    ranks_per_node: int
    rate: str

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}_{self.rate}"


SETTINGS = tuple(
    Setting(nodes, ranks, rate) for rate in ("200mbit", "1gbit") for nodes, ranks in ((2, 2), (4, 2), (4, 4))
)


def measure(setting: Setting, rounds: int, budget_s: float) -> dict[str, Any]:
    """Median step of each variant in each round, in ms, and what the tuner said."""
    with EmulatedCluster(setting.nodes, setting.ranks_per_node, setting.rate) as cluster:
        script = Path(__file__).with_name("tune_rank.py")
        size = ["--nodes", str(setting.nodes), "--ranks-per-node", str(setting.ranks_per_node)]
        how = ["--net", NET, "--rounds", str(rounds), "--budget", str(budget_s)]
        output = cluster.run(script, [*size, *how], timeout_s=2400)
    return dict(json.loads(output.split("RESULT ")[1]))


def row(setting: Setting, found: dict[str, Any]) -> list[str]:
    times: dict[str, list[float]] = found["times_ms"]
    medians = {name: estimate(values).median for name, values in times.items()}
    thresholds = [name for name in times if name.startswith("fusion ")]
    best_single = min(SINGLE, key=lambda name: medians[name])
    best_threshold = min(thresholds, key=lambda name: medians[name])
    over_best = paired_ratio(times[best_single], times["tuned"])
    return [
        setting.name,
        str(len(times["ddp"])),
        *(f"{medians[name]:.0f}" for name in ("no_comm", "ddp", "default", *SINGLE, "tuned")),
        str(paired_ratio(times["ddp"], times["tuned"])),
        str(paired_ratio(times["default"], times["tuned"])),
        f"{over_best} ({best_single})",
        f"{paired_ratio(times[best_threshold], times['tuned'])} ({best_threshold.removeprefix('fusion ')} MiB)",
        found["chosen"],
        "yes" if over_best.meets(1.0) else "NO",
    ]


HEADER = (
    "setting",
    "rounds",
    "no comm. ms",
    "ddp ms",
    "default ms",
    *(f"{name} ms" for name in SINGLE),
    "tuned ms",
    "tuned: x ddp",
    "x default",
    "x best single",
    "x best fixed threshold",
    "tuned takes",
    "not below the best single",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of settings", choices=[s.name for s in SETTINGS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for the tuner")
    parser.add_argument("--again", action="store_true", help="measure settings that are already in the results again")
    arguments = parser.parse_args()
    data: dict[str, Any] = read("tune") or {}
    chosen = [s for s in SETTINGS if not arguments.only or s.name in arguments.only]
    todo = [s for s in chosen if arguments.again or s.name not in data]
    command = f"python benchmarks/tune.py --rounds {arguments.rounds}"
    for i, setting in enumerate(todo):
        print(f"[{i + 1}/{len(todo)}] {setting.name}", file=sys.stderr, flush=True)
        try:
            data[setting.name] = measure(setting, arguments.rounds, arguments.budget)
        except ClusterUnavailable as error:
            sys.exit(f"no emulated cluster here: {error}")
        measured = [s for s in SETTINGS if s.name in data]
        told = "\n".join(f"- {s.name}: {data[s.name]['told']} Links: {data[s.name]['fit']}." for s in measured)
        rows = table(HEADER, [row(s, data[s.name]) for s in measured])
        text = (
            f"Steps of the net {NET} through the Trainer, FP32 on the wire. Tuned: table, groups, chunks, buckets\n"
            f"and their algorithm from `fourmin tune` ({arguments.budget:g} s for the table and each trial).\n"
            "Single algorithms have the default buckets; fixed thresholds have the tuned table and algorithm, and the\n"
            f"best is of those tried.\n\n{rows}\n\nWhat the tuner said:\n\n{told}"
        )
        write("tune", command, data, text)


if __name__ == "__main__":
    main()
