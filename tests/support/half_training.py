"""What the tests of FourMinPrecision train on one device: a small net with every kind of layer, and a quiet Trainer."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fourmin import FourMinPrecision

BATCH_SIZE = 4


class Net(LightningModule):
    """Convolution, batch norm and a linear layer; SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).flatten(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Round(torch.autograd.Function):
    """Rounds to 16 bit and back, a value on its way forward and its gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.to(ctx.dtype).float(), None


def loss_by_hand(net: Net, batch: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The loss of a batch as 16-bit training computes it: all in FP32, with every rounding written out."""

    def rounded(x: Tensor) -> Tensor:
        return Round.apply(x, dtype)

    x, labels = batch
    hidden = rounded(F.conv2d(rounded(x), rounded(net.conv.weight), rounded(net.conv.bias)))
    hidden = torch.relu(rounded(net.norm(hidden))).flatten(1)
    return F.cross_entropy(rounded(F.linear(hidden, rounded(net.head.weight), rounded(net.head.bias))), labels)


def images(num_batches: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    count = num_batches * BATCH_SIZE
    return DataLoader(
        TensorDataset(
            torch.randn(count, 3, 6, 6, generator=generator), torch.randint(5, (count,), generator=generator)
        ),
        BATCH_SIZE,
    )


def trainer(precision: FourMinPrecision | None = None, **kwargs: Any) -> Trainer:
    """Without a plugin: plain FP32."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "plugins": [] if precision is None else [precision],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**defaults | kwargs)


def fit(
    net: LightningModule, precision: FourMinPrecision | None = None, num_batches: int = 4, **kwargs: Any
) -> Trainer:
    run = trainer(precision, **kwargs)
    run.fit(net, images(num_batches))
    return run


def seeded(net_type: type[LightningModule] = Net) -> Any:
    torch.manual_seed(1)
    return net_type()


def state(net: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in net.state_dict().values()])


def weights(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()
