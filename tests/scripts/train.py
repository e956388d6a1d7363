"""A training script as users write it: `train.py strategy devices epochs [precision]` prints a checksum of weights."""

import hashlib
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fourmin  # noqa: F401
from tests.support.ranks import set_warning_filters

# At the top: spawned ranks import the script.
set_warning_filters()


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 1:
            print(f"rank {self.global_rank} of {self.trainer.world_size} trains", flush=True)
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(strategy: str, devices: str, epochs: str, precision: Any = "32-true") -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 32))
    net = Net()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=int(devices),
        max_epochs=int(epochs),
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(data, batch_size=2))
    if trainer.is_global_zero:
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        assert weights.dtype is torch.float32
        print("checksum", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
