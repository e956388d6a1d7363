"""Seeds what is random in a training step, dropout above all, from seed, rank, epoch and batch."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StepSeed(Callback):
    """Seeds torch before each training step, so that the step is a function of its place in the run.

    Strategies of Lightning seed all ranks alike; with this callback ranks drop different units. And a run that resumes
    from a checkpoint drops the units that it would have dropped without the interruption.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        place = [self._seed, trainer.global_rank, trainer.current_epoch, batch_idx]
        seed = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0])
        # Not torch.manual_seed, which notes the seed, and a stack, for every kind of device that is not used.
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(seed)
