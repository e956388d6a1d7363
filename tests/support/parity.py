"""What is trained with `fourmin` and with plain DDP to compare the two: a small net, seeded data, the state after."""

import hashlib
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.ranks import current_case

BATCH_SIZE = 2


class Net(LightningModule):
    """Convolution, batch norm and 1.3 MiB of weights, which DDP cuts into two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.hidden = nn.Sequential(nn.Linear(288, 1150), nn.ReLU())
        self.head = nn.Linear(1150, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.hidden(self.features(images)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9)


def images(num_batches: int) -> DataLoader[Any]:
    """This rank's share of `num_batches` batches a rank; the same images whatever the nodes."""
    case = current_case()
    num_images = num_batches * BATCH_SIZE * case.world
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(
        torch.randn(num_images, 3, 8, 8, generator=generator), torch.randint(10, (num_images,), generator=generator)
    )
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, case.world, case.rank, shuffle=False)
    return DataLoader(dataset, BATCH_SIZE, sampler=sampler)


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def state(module: nn.Module) -> Tensor:
    """All parameters and buffers as one vector."""
    return torch.cat([tensor.detach().flatten().double() for tensor in module.state_dict().values()])


def digest(tensor: Tensor) -> str:
    """Equal for tensors that are equal in every bit, and short: what a rank answers."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
