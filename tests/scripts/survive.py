"""A training script that goes on from its last checkpoint: `survive.py devices[xnodes] folder [fault...] [option...]`.

Trains on the digits and appends to `folder/rank<N>.txt` what each step saw. A fault is `rank:step:signal:milliseconds`:
that rank sends itself that signal so long after it has begun that step, once; with `:group` at its end, all processes
of the run. Options are `stall_warning_s=` of the strategy and `timeout_s=` of its groups (to meet, ranks have more).
The checksum of the weights is printed at the end.
"""

import hashlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_fourmin import LARS, FourMinStrategy, PreemptionCheckpoint, ShardDataModule
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.data.transforms import EvalImage
from tests.support.ranks import set_warning_filters

set_warning_filters()
# Where it goes on there are checkpoints already.
warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
PIXELS = EvalImage(size=8, resize=8)
BATCH_SIZE = 64
NUM_EPOCHS = 2


def numbered(sample: Sample, rng: np.random.Generator) -> tuple[Any, int, int]:
    """Pixels, label and the number of the sample."""
    return *PIXELS(sample, rng), sample.number


def _send_later(send: Callable[[int, int], None], target: int, number: int, delay_s: float) -> None:
    if delay_s:
        threading.Timer(delay_s, send, (target, number)).start()
    else:
        send(target, number)


class Digits(LightningModule):
    def __init__(self, folder: Path, faults: list[str], timeout_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
        self._folder, self._faults, self._timeout_s = folder, faults, timeout_s

    def setup(self, stage: str) -> None:
        # After the ranks have met and before the engine makes its groups.
        self.trainer.strategy._timeout = timedelta(seconds=self._timeout_s)  # type: ignore[attr-defined]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pixels, labels, numbers = batch
        for fault in self._faults:
            rank, step, name, delay_ms, *group = fault.split(":")
            marker = self._folder / f"{fault}.done"
            if (self.global_rank, self.global_step) == (int(rank), int(step)) and not marker.exists():
                marker.touch()
                target = (os.killpg, os.getpgrp()) if group else (os.kill, os.getpid())
                _send_later(*target, signal.Signals[name], float(delay_ms) / 1e3)
        with (self._folder / f"rank{self.global_rank}.txt").open("a") as file:
            print(self.global_step, self.current_epoch, *numbers.tolist(), file=file)
        return nn.functional.cross_entropy(self.net(pixels.float() / 255), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LARS(self.parameters(), lr=1.0, weight_decay=1e-4)


class AtEveryStep(PreemptionCheckpoint):
    interval_s = 0.0


def main(layout: str, folder: str, *arguments: str) -> None:
    devices, _, num_nodes = layout.partition("x")
    options = dict(argument.split("=") for argument in arguments if "=" in argument)
    torch.manual_seed(1)
    faults = [argument for argument in arguments if "=" not in argument]
    net = Digits(Path(folder), faults, float(options.get("timeout_s", 1800)))
    trainer = Trainer(
        accelerator="cpu",
        strategy=FourMinStrategy(stall_warning_s=float(options.get("stall_warning_s", 30))),
        devices=int(devices),
        num_nodes=int(num_nodes or 1),
        max_epochs=NUM_EPOCHS,
        limit_val_batches=0,
        logger=False,
        callbacks=[
            ModelCheckpoint(Path(folder) / "checkpoints", every_n_train_steps=3, save_last=True),
            AtEveryStep(),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = ShardDataModule("digits", BATCH_SIZE, train_transform=numbered, num_workers=1)
    resumable = list(Path(folder).glob("checkpoints/last*.ckpt"))
    trainer.fit(net, data, ckpt_path="last" if resumable else None)
    if trainer.is_global_zero:
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        print("checksum", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
