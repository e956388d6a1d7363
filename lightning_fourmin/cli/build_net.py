"""The net of `fourmin plan` and `tune`: `model=NAME` of this package, or `module=package.file:Name` of the user's."""

import importlib
from typing import Any

from torch import nn

from lightning_fourmin.errors import PlanError
from lightning_fourmin.models import build_model
from lightning_fourmin.simulate.layer_profile import ARGUMENT_ERRORS


def named_model(name: str, num_classes: int, model_options: dict[str, Any] | None) -> nn.Module:
    """The net of this package with that name; PlanError where its options do not fit."""
    try:
        return build_model(name, num_classes, **(model_options or {}))
    except ValueError as error:
        raise PlanError(str(error)) from error
    except ARGUMENT_ERRORS as error:
        raise PlanError(f"model={name} cannot be made with model.model_options ({error})") from error


def own_module(module: str, module_options: dict[str, Any] | None, hint: str = "") -> nn.Module:
    """The net that a class or function of the user's makes; PlanError, with `hint` at its end, where it cannot."""
    place, _, name = module.partition(":")
    try:
        made_by = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"module={module} cannot be imported ({error}): write package.file:Name, and run the command where Python "
            "finds the package"
        ) from error
    try:
        made = made_by(**(module_options or {}))
    except ARGUMENT_ERRORS as error:
        raise PlanError(f"module={module} cannot be made with module_options ({error}){hint}") from error
    if not isinstance(made, nn.Module):
        raise PlanError(f"module={module} makes a {type(made).__name__}, not a torch.nn.Module")
    return made


def sample_shape(
    net: nn.Module, is_own: bool, input_shape: list[int] | None, image_size: int | None = None
) -> list[int]:
    """The shape of one sample: `input_shape` if given, else that of an image of the size that the net is made for."""
    if input_shape is not None:
        return input_shape
    if is_own:
        raise PlanError("input_shape is not given: module needs the shape of one sample, input_shape=[3,224,224] say")
    side = int(getattr(net, "image_size", image_size or 224))
    return [3, side, side]
