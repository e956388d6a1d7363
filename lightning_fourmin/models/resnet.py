"""ResNets as large batches need them: v1.5, and the last batch norm of each branch begins with gamma 0.

So every block begins as the identity, and the first steps, whose rate is high, train a shallow net.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override


def _conv_and_norm(before: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    # The convolution needs no bias, since the batch norm has one.
    return nn.Conv2d(before, width, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(width)


class _Block(nn.Module):
    """A residual block: a branch, which ends with a batch norm, beside a connection that skips it."""

    def __init__(self, branch: nn.Sequential, before: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        self.skip: nn.Module = nn.Identity()
        out = self.last_norm.num_features
        if stride != 1 or before != out:
            self.skip = nn.Sequential(*_conv_and_norm(before, out, 1, stride))

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The batch norm at the end of the branch."""
        norm = self.branch[-1]
        assert isinstance(norm, nn.BatchNorm2d)
        return norm

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.branch(x) + self.skip(x))


def _basic(before: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_and_norm(before, width, 3, stride),
        nn.ReLU(inplace=True),
        *_conv_and_norm(width, width, 3),
    )


def _bottleneck(before: int, width: int, stride: int) -> nn.Sequential:
    # In v1.5 the 3x3 convolution has the stride. In v1 the first 1x1 had it and left out three quarters of its inputs.
    return nn.Sequential(
        *_conv_and_norm(before, width, 1),
        nn.ReLU(inplace=True),
        *_conv_and_norm(width, width, 3, stride),
        nn.ReLU(inplace=True),
        *_conv_and_norm(width, 4 * width, 1),
    )


class ResNet(nn.Sequential):
    """A stem, stages of blocks, the mean over the pixels, and a linear layer.

    Each stage but the first halves width and height and doubles the channels.
    """

    def __init__(
        self,
        num_classes: int,
        stem: nn.Sequential,
        make_branch: Callable[[int, int, int], nn.Sequential],
        width: int,
        depths: Sequence[int],
    ) -> None:
        """Builds the net.

        Args:
            num_classes: number of outputs.
            stem: the layers before the first stage.
            make_branch: makes the branch of a block; called with the channels before it, its width and its stride.
            width: channels of the first stage.
            depths: number of blocks in each stage.
        """
        super().__init__()
        self.stem = stem
        before = width
        for stage, depth in enumerate(depths):
            blocks = []
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(_Block(make_branch(before, width << stage, stride), before, stride))
                before = blocks[-1].last_norm.num_features
            self.add_module(f"stage{stage + 1}", nn.Sequential(*blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(before, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, _Block):
                nn.init.zeros_(layer.last_norm.weight)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)


def _imagenet_stem() -> nn.Sequential:
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(*_conv_and_norm(3, 64, 7, 2), nn.ReLU(inplace=True), pool)


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50 v1.5 for images of about 224 pixels: 161 tensors, 25,557,032 parameters at 1000 classes."""
    return ResNet(num_classes, _imagenet_stem(), _bottleneck, 64, (3, 4, 6, 3))


def resnet18(num_classes: int = 1000) -> ResNet:
    """ResNet-18 for images of about 224 pixels: 62 tensors, 11,689,512 parameters at 1000 classes."""
    return ResNet(num_classes, _imagenet_stem(), _basic, 64, (2, 2, 2, 2))


def resnet_small(num_classes: int = 10) -> ResNet:
    """ResNet-20 for images of 8 to 64 pixels: 65 tensors, 0.27 M parameters at 10 classes."""
    stem = nn.Sequential(*_conv_and_norm(3, 16, 3), nn.ReLU(inplace=True))
    return ResNet(num_classes, stem, _basic, 16, (3, 3, 3))
