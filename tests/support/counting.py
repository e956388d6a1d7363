"""A LightningModule that remembers the samples it saw, and a callback that saves, for tests of what is read when."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fourmin import ShardDataModule
from tests.support.shards import number_of


class Counting(LightningModule):
    """Trains on the numbers that `shards.write_numbers` wrote."""

    def __init__(self, reads_estimate: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.top1 = MeanMetric()
        self._reads_estimate = reads_estimate
        self.seen: list[tuple[int, list[int]]] = []
        """Epoch and samples of each batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch.tolist()))
        return (self.net(batch.float().unsqueeze(1) / 10) - 1).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        correct = (batch % 3 == 0).float()
        self.top1(correct)
        self.log("top1", self.top1, on_step=False, on_epoch=True, batch_size=len(batch))
        # Summed over the ranks after each batch: hangs if their numbers of batches differ.
        self.log("mean", correct.mean(), on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._reads_estimate:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class SaveAt(Callback):
    """Saves one checkpoint, at a step or at the end of an epoch or of the validation in it."""

    def __init__(self, path: Path, hook: str, at: int) -> None:
        self._path, self._hook, self._at = path, hook, at

    def _save(self, trainer: Trainer, hook: str, at: int) -> None:
        if hook == self._hook and at == self._at and not trainer.sanity_checking:
            trainer.save_checkpoint(self._path)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self._save(trainer, "batch", trainer.global_step)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._save(trainer, "validation", trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._save(trainer, "epoch", trainer.global_step)


def numbers_module(path: str, batch_size: int, **kwargs: Any) -> ShardDataModule:
    defaults = {"num_workers": 0, "window": 8, "val_split": "train"}
    return ShardDataModule(path, batch_size, train_transform=number_of, eval_transform=number_of, **defaults | kwargs)
