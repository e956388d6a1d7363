"""One rank of the step benchmark: fits each variant in turn, round after round, and rank 0 prints the step times."""

import argparse
import gc
import importlib
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

import lightning_fourmin as fm
from models import NETS


class HookedDDP(DDPStrategy):
    """Lightning's DDP with its hook registered on CPU too."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, None, self._ddp_comm_hook)


VARIANTS: dict[str, Any] = {
    "no_comm": lambda: HookedDDP(ddp_comm_hook=noop_hook),
    "ddp": DDPStrategy,
    "ddp_fp16": lambda: HookedDDP(ddp_comm_hook=fp16_compress_hook),
    "fourmin": fm.FourMinStrategy,
    "fourmin_fp16": lambda: fm.FourMinStrategy(wire_dtype="fp16"),
}


class Classifier(L.LightningModule):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class StepTimes(L.Callback):
    """Time stamps at the start of each batch: a step lasts from one to the next."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.stamps.append(time.perf_counter())


def fit_once(
    variant: str,
    net_name: str,
    num_steps: int,
    num_warmup: int,
    nodes: int,
    ranks_per_node: int,
    callbacks: Sequence[L.Callback] = (),
    **trainer_kwargs: Any,
) -> float:
    """Median milliseconds of a step."""
    make, side, batch_size = NETS[net_name]
    L.seed_everything(1, verbose=False)
    count = (num_steps + num_warmup + 1) * batch_size * nodes * ranks_per_node
    data = TensorDataset(
        torch.randn(64, 3, side, side).repeat(-(-count // 64), 1, 1, 1)[:count], torch.arange(count) % 10
    )
    times = StepTimes()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks_per_node,
        num_nodes=nodes,
        strategy=VARIANTS[variant](),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times, *callbacks],
        plugins=[TorchElasticEnvironment()],
        **trainer_kwargs,
    )
    trainer.fit(Classifier(make()), DataLoader(data, batch_size))
    del trainer, data
    gc.collect()  # a Trainer refers to itself, and would keep data and net of many fits
    steps = [1e3 * (b - a) for a, b in zip(times.stamps, times.stamps[1:], strict=False)]
    return statistics.median(steps[num_warmup:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", choices=sorted(NETS), required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--before", help="folder of an earlier version to alternate with, as step.py exports it")
    arguments = parser.parse_args()
    if arguments.before:
        sys.path.append(arguments.before)
        before = importlib.import_module("lightning_fourmin_before")
        VARIANTS["fourmin_before"] = before.FourMinStrategy
        VARIANTS["fourmin_fp16_before"] = lambda: before.FourMinStrategy(wire_dtype="fp16")
        arguments.variants = ["fourmin_before", "fourmin", "fourmin_fp16_before", "fourmin_fp16"]
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {variant: [] for variant in arguments.variants}
    for turn in range(arguments.rounds):
        order = list(times) if turn % 2 == 0 else list(reversed(times))
        for variant in order:
            times[variant].append(
                fit_once(
                    variant,
                    arguments.net,
                    arguments.steps,
                    arguments.warmup,
                    arguments.nodes,
                    arguments.ranks_per_node,
                )
            )
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps(times))


if __name__ == "__main__":
    main()
