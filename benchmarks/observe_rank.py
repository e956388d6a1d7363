"""One rank of the observing benchmark: steps without communication, with it, with the monitor and with a trace."""

import argparse
import json
import logging
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import lightning_fourmin as fm
from models import NETS
from step_rank import VARIANTS, fit_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", choices=sorted(NETS), required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="fourmin-observe-") as folder:
        # As fourmin but for the engine: DDP's own strategy would still broadcast batch-norm statistics.
        VARIANTS["no_comm"] = lambda: fm.FourMinStrategy(ddp_comm_hook=noop_hook)
        VARIANTS["monitored"] = fm.FourMinStrategy
        VARIANTS["traced"] = lambda: fm.FourMinStrategy(trace=True)
        names = ["no_comm", "fourmin", "monitored", "traced"]
        for turn in range(arguments.rounds):
            found: dict[str, float] = {}
            for name in names if turn % 2 == 0 else reversed(names):
                monitor = fm.ScalingMonitor()
                found[name] = fit_once(
                    name,
                    arguments.net,
                    arguments.steps,
                    arguments.warmup,
                    arguments.nodes,
                    arguments.ranks_per_node,
                    callbacks=[monitor] if name == "monitored" else [],
                    default_root_dir=folder,
                )
                if name == "monitored":
                    assert monitor.summary is not None
                    assert monitor.summary.e is not None
                    found["e"] = monitor.summary.e
            rounds.append(found)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(rounds))


if __name__ == "__main__":
    main()
