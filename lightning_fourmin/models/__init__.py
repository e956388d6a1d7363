"""The nets of the paper and small nets like them, by name."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch import nn

from lightning_fourmin.models.alexnet import alexnet_bn, alexnet_bn_small
from lightning_fourmin.models.resnet import resnet18, resnet50, resnet_small

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet_bn": alexnet_bn,
    "alexnet_bn_small": alexnet_bn_small,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet_small": resnet_small,
}
"""The functions that make the nets. Each takes the number of classes first."""
SMALLEST_IMAGE = {"alexnet_bn": 67, "alexnet_bn_small": 8, "resnet18": 32, "resnet50": 32, "resnet_small": 8}
"""The least width and height of images for each net, in pixels: with smaller ones its last layers see nothing."""


def build_model(name: str, num_classes: int, **options: Any) -> nn.Module:
    """Makes the net of a name; `options` are further arguments of its function in `MODELS`."""
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {near[0]!r}? The others are " if near else "choose one of "
        others = ", ".join(repr(known) for known in MODELS if known not in near)
        raise ValueError(f"model={name!r} is not known: {hint}{others}")
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} must be at least 1")
    return MODELS[name](num_classes, **options)
