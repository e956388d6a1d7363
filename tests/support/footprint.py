"""What a process holds: a long run and many short ones must not hold more and more."""

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_fourmin import FourMinPrecision, FourMinStrategy
from tests.support.parity import Net, images
from tests.support.ranks import rank_env
from tests.support.training import rank_trainer

SLACK = 2
"""Files that are open, and threads that are ending, just when a footprint is taken."""


class Footprint(NamedTuple):
    """Of this process, now."""

    num_threads: int
    num_files: int
    memory_mb: float

    @classmethod
    def take(cls) -> "Footprint":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        )


def check_flat(first: Footprint, last: Footprint) -> None:
    assert last.num_threads <= first.num_threads + SLACK
    assert last.num_files <= first.num_files + SLACK


class Validated(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


class Recorder(Callback):
    """Takes a footprint at every `every`-th step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.taken: list[Footprint] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if (trainer.fit_loop.total_batch_idx + 1) % self._every == 0:
            self.taken.append(Footprint.take())


def long_fit(folder: Path, num_steps: int, every: int) -> list[Footprint]:
    """Footprints in a fit of `num_steps` optimizer steps with accumulation, validation and checkpoints."""
    torch.manual_seed(1)
    recorder = Recorder(every)
    trainer = rank_trainer(
        FourMinStrategy(fusion_mb=0.1),
        max_steps=num_steps,
        accumulate_grad_batches=2,
        val_check_interval=100,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        callbacks=[recorder, ModelCheckpoint(folder, every_n_train_steps=50, save_top_k=1)],
        enable_checkpointing=True,
        plugins=[rank_env(), FourMinPrecision()],
    )
    trainer.fit(Validated(), images(200), images(2))
    assert trainer.global_step == num_steps
    return recorder.taken


def many_fits(num_fits: int) -> list[Footprint]:
    """Footprints after each of so many fits in one process."""
    taken = []
    for _ in range(num_fits):
        rank_trainer(FourMinStrategy(fusion_mb=0.1), max_steps=3).fit(Net(), images(3))
        taken.append(Footprint.take())
    return taken
