"""The nets that the benchmarks train."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class FullyConnectedHeavy(nn.Sequential):
    """A small AlexNet-BN: 2.2 M parameters, 99 % of them in three fully connected layers, for 32 px images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 24, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(24),
            nn.Conv2d(24, 56, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(56),
            nn.Flatten(),
            nn.Linear(56 * 16, 1024),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(1024, 1200),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(1200, 10),
        )


class _Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class DeepNarrow(nn.Sequential):
    """A ResNet of 27 blocks, 16 to 64 channels: 0.86 M parameters in 169 tensors, for 16 px images."""

    def __init__(self) -> None:
        widths = [16] * 9 + [32] * 9 + [64] * 9
        blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        before = 16
        for width in widths:
            blocks.append(_Block(before, width, 1 if width == before else 2))
            before = width
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class SmallAlexNetBN(nn.Sequential):
    """AlexNet-BN at 64 px with half the channels: 5.4 M parameters, 4.5 M of them in fully connected layers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 48, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.BatchNorm2d(48),
            nn.Conv2d(48, 128, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.BatchNorm2d(128),
            nn.Conv2d(128, 192, 3, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(192),
            nn.Conv2d(192, 192, 3, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(192),
            nn.Conv2d(192, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.BatchNorm2d(128),
            nn.Flatten(),
            nn.Linear(128 * 9, 2048),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(2048, 1024),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(1024, 10),
        )


class ResNet18(nn.Sequential):
    """ResNet-18 with its usual stem and widths: 11.2 M parameters."""

    def __init__(self) -> None:
        stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        blocks = [_Block(b, w, 1 if b == w else 2) for b, w in zip((64, *widths), widths, strict=False)]
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class _Busy(torch.autograd.Function):
    """Takes time and leaves the cores alone, forward and backward, as work on an accelerator does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(LAYER_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * LAYER_S)
        return grad


class _DeviceLayer(nn.Module):
    """Work elsewhere, and weights with gradients."""

    def __init__(self, num_weights: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_weights))

    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(x + self.weight.mean())


LAYER_S = 5e-3


class DeviceLike(nn.Sequential):
    """Eight layers of 0.25 M weights whose computing needs no core: what ranks do not share they cannot slow down."""

    def __init__(self) -> None:
        layers = [_DeviceLayer(250_000) for _ in range(8)]
        super().__init__(nn.Flatten(), nn.Linear(3 * 8 * 8, 10), *layers)


NETS: dict[str, tuple[type[nn.Module], int, int]] = {
    "fc_heavy": (FullyConnectedHeavy, 32, 32),
    "deep_narrow": (DeepNarrow, 16, 16),
    "device_like": (DeviceLike, 8, 16),
}
"""Of the step benchmark: name -> net, image side in pixels, batch a rank."""
