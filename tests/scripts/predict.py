"""Predicts on two ranks; the second takes longer than the first waits for ranks that are lost."""

import time

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn, zeros
from torch.utils.data import DataLoader, TensorDataset

from lightning_fourmin.faults import launcher
from tests.support.ranks import set_warning_filters

set_warning_filters()
launcher.GRACE_S = launcher.POLL_S = 0.1


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(3 * self.global_rank)
        print(f"rank {self.global_rank} has predicted", flush=True)
        return self.net(batch[0])


if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", strategy="fourmin", devices=2, logger=False, enable_progress_bar=False)
    trainer.predict(Net(), DataLoader(TensorDataset(zeros(2, 2))))
