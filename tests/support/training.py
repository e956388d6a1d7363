"""A quiet Trainer on the ranks of the running case, and models of several buckets to train with it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.ranks import current_case, rank_env


def rank_trainer(strategy: str | Strategy, **kwargs: Any) -> Trainer:
    """A Trainer for a function that `RankPool.run` calls; `kwargs` go to the Trainer."""
    case = current_case()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": case.local_size,
        "num_nodes": len(case.nodes),
        "plugins": [rank_env()],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, **defaults | kwargs)


class Regression(LightningModule):
    """Trains any network to make zeros of its input."""

    def __init__(self, net: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data(*shape: int, num_steps: int = 4, batch_size: int = 2) -> DataLoader[Any]:
    """`num_steps` batches a rank of random samples that differ between ranks."""
    case = current_case()
    samples = torch.randn(num_steps * batch_size * case.world, *shape, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(samples)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, case.world, case.rank, shuffle=False)
    return DataLoader(dataset, batch_size, sampler=sampler)
