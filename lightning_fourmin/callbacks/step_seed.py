"""Seeding of what is random in a training step, such as dropout, from seed, rank, epoch and batch."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StepSeed(Callback):
    """Seeds torch before each training step, so that its random numbers depend only on its place in the run.

    Lightning's strategies seed all ranks alike; with this callback, dropout drops different units on each rank. And a
    run that resumes from a checkpoint drops the units that it would have dropped without the interruption.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        place = [self._seed, trainer.global_rank, trainer.current_epoch, batch_idx]
        seed = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0])
        # torch.manual_seed would also record the seed, with a stack trace, for every kind of device that is not in use.
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(seed)
