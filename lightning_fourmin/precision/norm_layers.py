"""Normalisation layers between 16-bit layers: parameters, statistics and arithmetic stay in FP32."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from lightning_fourmin.precision.cpu_half_ops import HALVES

NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""Subclasses count: a layer is known by its type, whatever its `forward` does."""
_MIXED_FORWARDS = {cls.forward for cls in (_BatchNorm, nn.SyncBatchNorm, _InstanceNorm)}
"""These call kernels that read 16-bit activations and compute in FP32. On a GPU that saves memory traffic; on a CPU the
kernels are slower than two casts. Autocast itself casts the inputs of the others."""


def tensors_of_norms(module: nn.Module) -> set[Tensor]:
    """Parameters and buffers of all norm layers of a module."""
    layers = (layer for layer in module.modules() if isinstance(layer, NORM_LAYERS))
    return {t for layer in layers for t in chain(layer.parameters(recurse=False), layer.buffers(recurse=False))}


def keep_norms_in_fp32(module: nn.Module) -> list[RemovableHandle]:
    """Hooks for all norm layers of a module that cast at their borders; float64 stays as it is."""
    handles = []
    for layer in module.modules():
        if isinstance(layer, NORM_LAYERS):
            handles.append(layer.register_forward_pre_hook(_inputs_to_fp32))
            handles.append(layer.register_forward_hook(_output_to_16_bit))
    return handles


def _inputs_to_fp32(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if type(layer).forward in _MIXED_FORWARDS and inputs and inputs[0].device.type != "cpu":
        return inputs
    return tuple(x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x for x in inputs)


def _output_to_16_bit(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Tensor) and output.dtype is torch.float32 and torch.is_autocast_enabled(output.device.type):
        return output.to(torch.get_autocast_dtype(output.device.type))
    return output
