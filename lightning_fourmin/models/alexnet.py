"""AlexNet with batch norm after its convolutions, the last of which, bn5, the paper adds (its section 3.1).

    conv1 - relu - pool - bn    conv2 - relu - pool - bn    conv3 - relu - bn    conv4 - relu - bn
    conv5 - relu - pool - [bn5] - fc6 - relu - dropout - fc7 - relu - dropout - fc8

Without bn5 the inputs of fc6 drift as conv5 learns, which costs 1.6 points of top-1 at a global batch of 64K.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True)
class _Shape:
    """What the large and the small net differ in."""

    widths: tuple[int, int, int, int, int]
    """The number of channels of each convolution."""
    conv1: tuple[int, int, int]
    """Kernel, stride and padding of the first convolution. The others have stride 1 and keep the size of the image."""
    pool_padding: int
    hidden: int
    """The number of features of fc6 and fc7."""


_BIG = _Shape((96, 256, 384, 384, 256), conv1=(11, 4, 0), pool_padding=0, hidden=4096)
_SMALL = _Shape((32, 64, 96, 96, 64), conv1=(5, 1, 2), pool_padding=1, hidden=512)


class AlexNetBN(nn.Sequential):
    """AlexNet with batch norm. The layers have the names of the paper: `conv1.weight` is its first parameter."""

    def __init__(self, num_classes: int, shape: _Shape, image_size: int, bn5: bool, dropout: float) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        side, before = image_size, 3
        convs = (shape.conv1, (5, 1, 2), *[(3, 1, 1)] * 3)
        for number, (width, (kernel, stride, padding)) in enumerate(zip(shape.widths, convs, strict=True), start=1):
            layers[f"conv{number}"] = nn.Conv2d(before, width, kernel, stride, padding)
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
            side = (side + 2 * padding - kernel) // stride + 1
            if number in (1, 2, 5):
                layers[f"pool{number}"] = nn.MaxPool2d(3, stride=2, padding=shape.pool_padding)
                side = (side + 2 * shape.pool_padding - 3) // 2 + 1
            if number < 5 or bn5:
                layers[f"bn{number}"] = nn.BatchNorm2d(width)
            before = width
        if side < 1:
            raise ValueError(f"image_size={image_size} leaves nothing after pool5: use larger images or a smaller net")
        layers["flatten"] = nn.Flatten()
        before *= side * side
        for number in (6, 7):
            layers[f"fc{number}"] = nn.Linear(before, shape.hidden)
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
            layers[f"drop{number}"] = nn.Dropout(dropout)
            before = shape.hidden
        layers["fc8"] = nn.Linear(before, num_classes)
        super().__init__(layers)
        self.image_size = image_size
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        # Small, so that all classes are about equally likely at first.
        nn.init.normal_(self.get_parameter("fc8.weight"), std=0.01)

    @override
    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-2:] != (self.image_size, self.image_size):
            height, width = input.shape[-2:]
            raise ValueError(
                f"images of {height} x {width} pixels in an AlexNet made for {self.image_size} x {self.image_size}: "
                "give the model and the data the same image_size"
            )
        scores: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return scores


def alexnet_bn(num_classes: int = 1000, *, image_size: int = 227, bn5: bool = True, dropout: float = 0.5) -> AlexNetBN:
    """The paper's AlexNet, without groups: 26 tensors, 62,381,096 parameters at 1000 classes.

    Args:
        num_classes: number of outputs.
        image_size: width and height of the images in pixels, at least 67; the weights of fc6 depend on it.
        bn5: whether there is a batch norm after pool5.
        dropout: probability of the dropout after fc6 and fc7.
    """
    return AlexNetBN(num_classes, _BIG, image_size, bn5, dropout)


def alexnet_bn_small(
    num_classes: int = 10, *, image_size: int = 32, bn5: bool = True, dropout: float = 0.5
) -> AlexNetBN:
    """The same layers with a third of the channels, for images of 8 to 64 pixels: 1.0 M parameters at 32 pixels.

    Args:
        num_classes: number of outputs.
        image_size: width and height of the images in pixels; the weights of fc6 depend on it.
        bn5: whether there is a batch norm after pool5.
        dropout: probability of the dropout after fc6 and fc7.
    """
    return AlexNetBN(num_classes, _SMALL, image_size, bn5, dropout)
