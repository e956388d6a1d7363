"""One rank of the tuner's benchmark: tunes, then fits each variant in turn, round after round."""

import argparse
import json
import logging
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.process_groups import broadcast_object
from lightning_fourmin.text import readable_size
from lightning_fourmin.tune.tuner import TIMEOUT, TuneOptions, tune
from models import NETS
from step_rank import VARIANTS, fit_once

THRESHOLDS_MB = (0.5, 1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", choices=sorted(NETS), required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    make, side, batch_size = NETS[arguments.net]
    with tempfile.TemporaryDirectory(prefix="fourmin-tune-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # `default` finds no table there
        path = broadcast_object(Path(folder) / "tuned" / "table.csv")  # rank 0's folder; only rank 0 reads from it
        largest_mb = sum(p.numel() * 4 for p in make().parameters()) / 2**20
        options = TuneOptions(
            budget_s=arguments.budget,
            largest_mb=largest_mb,
            out=str(path),
        )
        net, inputs = make(), torch.randn(batch_size, 3, side, side)
        table, told = tune(options, int(os.environ["NODE_RANK"]), torch.device("cpu"), lambda: (net, inputs))
        VARIANTS["default"] = FourMinStrategy
        for name in ("ring", "hierarchical", "torus"):
            VARIANTS[name] = partial(FourMinStrategy, algorithm=name)
        VARIANTS["tuned"] = partial(FourMinStrategy, table=path)
        for threshold in THRESHOLDS_MB:
            VARIANTS[f"fusion {threshold:g}"] = partial(
                FourMinStrategy, table=path, fusion_mb=threshold, algorithm=table.algorithm or "hybrid"
            )
        variants = [name for name in VARIANTS if name not in ("ddp_fp16", "fourmin", "fourmin_fp16")]
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(arguments.rounds):
            for name in variants if turn % 2 == 0 else reversed(variants):
                ranks = (arguments.nodes, arguments.ranks_per_node)
                times[name].append(fit_once(name, arguments.net, arguments.steps, arguments.warmup, *ranks))
        dist.barrier()
    if dist.get_rank() == 0:
        groups = f", groups of {table.group_size}" if table.group_size else ""
        buckets = f"fusion_mb {table.fusion_mb:g}, {table.summary()}"
        chosen = f"{buckets}{groups}, chunks of {readable_size(table.chunk_bytes)}"
        print("RESULT", json.dumps({"times_ms": times, "chosen": chosen, "told": told[-1], "fit": table.fit}))


if __name__ == "__main__":
    main()
