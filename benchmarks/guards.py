"""What the callbacks that guard a run cost: steps with PreemptionCheckpoint and FiniteCheck against steps without.

Example: .venv/bin/python benchmarks/guards.py         # 2 ranks, under 3 minutes
"""

import argparse
import json
import logging
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence

import lightning as L
import torch

import lightning_fourmin as fm
from results import table, write
from stats import estimate, paired_ratio
from step_rank import StepTimes, fit_once

NUM_STEPS, NUM_WARMUP = 120, 10
NET = "fc_heavy"


class EveryStep(fm.PreemptionCheckpoint):
    interval_s = 0.0


GUARDS: dict[str, Callable[[], Sequence[L.Callback]]] = {
    "none": lambda: [],
    "PreemptionCheckpoint": lambda: [fm.PreemptionCheckpoint()],
    "PreemptionCheckpoint, asking after every step": lambda: [EveryStep()],
    "FiniteCheck": lambda: [fm.FiniteCheck()],
    "both, as in `fourmin train`": lambda: [fm.PreemptionCheckpoint(), fm.FiniteCheck()],
}


def step_ms(guards: Sequence[L.Callback]) -> float:
    """The mean: a question that is asked once a second is in no median."""
    times = StepTimes()
    fit_once("fourmin", NET, NUM_STEPS, NUM_WARMUP, 1, 2, callbacks=[times, *guards])
    stamps = times.stamps[NUM_WARMUP:]
    return 1e3 * (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def rank_main(num_rounds: int) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in GUARDS}
    step_ms([])
    for turn in range(num_rounds):
        for name in found if turn % 2 == 0 else reversed(found):
            found[name].append(step_ms(GUARDS[name]()))
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rounds)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    command = [*launch, f"--master_port={port}", __file__, "--rank", "--rounds", str(arguments.rounds)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if output.returncode:
        sys.exit(output.stderr[-3000:])
    found = json.loads(output.stdout.split("RESULT ")[1])
    rows = []
    for name, times in found.items():
        ratio = paired_ratio(times, found["none"])
        interval = f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        rows.append([name, f"{estimate(times).median:.2f}", "1" if name == "none" else interval])
    text = (
        f"Mean milliseconds of a step of {NET} in FP32 on 2 ranks of this machine, {NUM_STEPS} steps a fit; medians\n"
        f"of {arguments.rounds} rounds in which all were measured one after the other.\n\n"
    )
    header = ("callbacks", "step ms", "step with / without")
    write("guards", f"python benchmarks/guards.py --rounds {arguments.rounds}", found, text + table(header, rows))


if __name__ == "__main__":
    main()
