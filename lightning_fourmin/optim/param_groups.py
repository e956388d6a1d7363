"""The parameter groups of the recipe: weights with decay and trust ratio, biases and norm layers with neither."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_fourmin.precision.weight_copies import NORM_LAYERS


def param_groups(
    module: nn.Module,
    weight_decay: float,
    *,
    norm_types: Sequence[type[nn.Module]] = (),
    names: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns groups for an optimizer: weights with decay; biases and norm parameters without decay and trust ratio.

    A parameter is a bias if its own name has the word "bias" (`fc.bias`, `in_proj_bias`, `bias_ih_l0`). Norm parameters
    belong to one of torch's norm layers or to a class derived from them. Frozen parameters are in the groups, too: they
    stay as they are until they get a gradient.

    Args:
        module: The module with the parameters; those that it shares between layers are taken once.
        weight_decay: The decay of the weights.
        norm_types: More classes of norm layers, for those that do not derive from torch's.
        names: More parameters without decay and trust ratio, as names or patterns such as "*.gamma".

    Example:
        ```python
        LARS(param_groups(module, weight_decay=2e-4, names=["*.gamma"]), lr=10.0)
        ```
    """
    named = list(module.named_parameters())
    if not named:
        raise ValueError(f"{type(module).__name__} has no parameters to make groups of")
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(f"names has {pattern!r}, which matches no parameter of {type(module).__name__}")
    norm_layers = (*NORM_LAYERS, *norm_types)
    weights: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        owner, _, own_name = name.rpartition(".")
        is_weight = not (
            isinstance(module.get_submodule(owner), norm_layers)
            or "bias" in own_name.split("_")
            or any(fnmatchcase(name, pattern) for pattern in names)
        )
        (weights if is_weight else others).append((name, parameter))
    groups = [
        {"name": "weights", "params": weights, "weight_decay": weight_decay},
        {"name": "biases_and_norms", "params": others, "weight_decay": 0.0, "trust_coefficient": None},
    ]
    return [group for group in groups if group["params"]]
