"""A training script that ends without a teardown of its strategy: `leave.py start_method rank`; this rank is last."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn, optim, randn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fourmin import FourMinStrategy
from tests.support.ranks import set_warning_filters

set_warning_filters()


class Leaves(FourMinStrategy):
    """Leaves everything that was started for the run to the end of the process."""

    last_rank: int

    def teardown(self) -> None:
        if self.global_rank == self.last_rank:
            time.sleep(2)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def on_train_end(self) -> None:
        print(f"rank {self.global_rank} has trained", flush=True)

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def main(start_method: str, last_rank: str) -> None:
    strategy = Leaves(start_method=start_method)
    strategy.last_rank = int(last_rank)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(randn(16, 4)), 4))


if __name__ == "__main__":
    main(*sys.argv[1:])
