"""What observing costs, and how right it is: ScalingMonitor's e against measured steps, monitor and trace against none.

Example: sudo .venv/bin/python benchmarks/observe.py         # 25 minutes
         .venv/bin/python benchmarks/observe.py --only       # writes the page anew from what was measured
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cluster import ClusterUnavailable, EmulatedCluster
from results import read, table, write
from stats import estimate, paired_ratio

SETTINGS = {
    f"{nodes}x{ranks}_{rate}_{net}": (nodes, ranks, rate, net)
    for nodes, ranks, rate, net in (
        (2, 1, "200mbit", "device_like"),
        (2, 2, "200mbit", "device_like"),
        (2, 2, "1gbit", "device_like"),
        (2, 1, "200mbit", "fc_heavy"),
        (2, 1, "200mbit", "deep_narrow"),
        (2, 1, "1gbit", "deep_narrow"),
        (2, 2, "200mbit", "fc_heavy"),
    )
}
GOAL, COST_GOAL = 0.05, 1.01

HEADER = (
    "setting",
    "rounds",
    "step ms",
    "without communication ms",
    "e, truth",
    "e, monitor",
    "monitor / truth - 1",
    "within 5 %",
    "monitor - truth, points",
    "step with monitor / without",
    "step with trace / without",
    "trace under 1 %",
)


def row(name: str, rounds: list[dict[str, float]]) -> list[str]:
    def values(key: str) -> list[float]:
        return [one[key] for one in rounds]

    truth = [one["no_comm"] / one["monitored"] for one in rounds]
    error = estimate([one["e"] / true - 1 for one, true in zip(rounds, truth, strict=True)])
    points = estimate([100 * (one["e"] - true) for one, true in zip(rounds, truth, strict=True)])
    monitored, traced = (paired_ratio(values(key), values("fourmin")) for key in ("monitored", "traced"))
    return [
        name,
        str(len(rounds)),
        *(f"{estimate(values(key)).median:.0f}" for key in ("monitored", "no_comm")),
        f"{estimate(truth).median:.3f}",
        f"{estimate(values('e')).median:.3f}",
        str(error),
        "yes" if abs(error.median) <= GOAL else "NO",
        str(points),
        str(monitored),
        str(traced),
        "yes" if traced.low <= COST_GOAL else "NO",
    ]


def measure(name: str, rounds: int) -> list[dict[str, float]]:
    nodes, ranks, rate, net = SETTINGS[name]
    with EmulatedCluster(nodes, ranks, rate) as cluster:
        size = ["--nodes", str(nodes), "--ranks-per-node", str(ranks)]
        script = Path(__file__).with_name("observe_rank.py")
        output = cluster.run(script, ["--net", net, "--rounds", str(rounds), *size], timeout_s=1200)
    return list(json.loads(output.split("RESULT ")[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    data: dict[str, Any] = read("observe") or {}
    for i, name in enumerate(arguments.only):
        print(f"[{i + 1}/{len(arguments.only)}] {name}", file=sys.stderr, flush=True)
        try:
            data[name] = measure(name, arguments.rounds)
        except ClusterUnavailable as error:
            sys.exit(f"no emulated cluster here: {error}")
        publish(data, arguments.rounds)
    if not arguments.only:
        publish(data, arguments.rounds)


def publish(data: dict[str, Any], num_rounds: int) -> None:
    rows = [row(name, data[name]) for name in SETTINGS if name in data]
    write("observe", f"python benchmarks/observe.py --rounds {num_rounds}", data, TEXT + table(HEADER, rows))


TEXT = """\
Truth is the step with a hook that sends nothing, by the step with the monitor. Layers of device_like take time but no
core, as those of an accelerator: there the monitor's e has to be the truth. The other nets compute on the two cores
that also carry the packets of the emulated network and sum the gradients. That slows computing down, which is no wait,
so there e lies above the truth by what sending costs the cores, and S is lower by as much.

"""


if __name__ == "__main__":
    main()
