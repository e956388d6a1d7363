"""Callbacks compute for exactly those steps that Lightning writes, also when a run resumes."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_fourmin.callbacks.logged_steps import is_logged_step
from tests.support.half_training import Net, images, trainer


class Numbers(Callback):
    """Logs the number of each batch, and keeps those of the batches that it takes for logged ones."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.global_step = 0
        self.logged: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.global_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        self.num_batches += 1
        pl_module.log("batch", float(self.num_batches))
        if is_logged_step(trainer, pl_module) and trainer.global_step != self.global_step:
            self.logged.append(self.num_batches)
        self.global_step = trainer.global_step


class TwoOptimizers(Net):
    """The second optimizer steps every other batch; the second epoch ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.current_epoch, batch_idx) == (1, 4) else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for optimizer in optimizers[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.conv, self.head)]


def train(kind: type[Net], folder: Path, checkpoint: Path, **kwargs: Any) -> list[int]:
    """The batches that are taken for logged ones, which have to be those in the log."""
    numbers = Numbers()
    save = LambdaCallback(
        on_train_batch_end=lambda run, *_: numbers.num_batches == 9 and run.save_checkpoint(checkpoint)
    )
    run = trainer(max_epochs=3, logger=CSVLogger(folder, name="", version=""), callbacks=[numbers, save], **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        run.fit(kind(), images(7), ckpt_path=checkpoint if checkpoint.exists() else None)
    with (folder / "metrics.csv").open() as file:
        assert [float(row["batch"]) for row in csv.DictReader(file)] == numbers.logged
    return numbers.logged


@pytest.mark.parametrize(("kind", "num_accumulated"), [(Net, 1), (Net, 2), (TwoOptimizers, 1)])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_batches_that_lightning_writes(tmp_path: Path, kind: type[Net], num_accumulated: int, every: int) -> None:
    options = {"log_every_n_steps": every, "accumulate_grad_batches": num_accumulated}
    at_once = train(kind, tmp_path / "at_once", tmp_path / "some.ckpt", **options)
    assert len(at_once) >= 4
    resumed = train(kind, tmp_path / "resumed", tmp_path / "some.ckpt", **options)
    assert [9 + number for number in resumed] == [number for number in at_once if number > 9]
