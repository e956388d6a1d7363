"""16-bit copies that stand in for a module's FP32 parameters while a step runs.

in a step           layer.weight       -> a 16-bit copy; its cast is in the graph: FP32 gradients reach the master
                    layer.parameters() -> the FP32 masters, as for optimizers, state_dict and regularisers
outside of a step   both               -> the FP32 masters
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fourmin.precision.cpu_half_ops import HALVES

NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""Subclasses count: a layer is known by its type, whatever its `forward` does."""
_MIXED_FORWARDS = {cls.forward for cls in (_BatchNorm, nn.SyncBatchNorm, _InstanceNorm)}
"""These call kernels that read 16-bit activations and compute in FP32. On a GPU that saves memory traffic; on a CPU the
kernels are slower than two casts. Autocast itself casts the inputs of the others."""
_IN_FP32 = (*NORM_LAYERS, ParametrizationList)
"""Keep their parameters: a weight that is computed (spectral norm) is so in FP32, and products round the result."""
_Copies = dict[tuple[bool, bool], dict[Tensor, Tensor]]
"""By what a copy is good for (gradients, inference mode) and by master: tied weights share a copy."""


class _Parameters(dict[str, nn.Parameter | None]):
    """Stands in for a module's `_parameters`: one looked up by name is a copy, those listed are the masters."""

    def __init__(self, masters: dict[str, nn.Parameter | None], dtype: torch.dtype, copies: _Copies) -> None:
        super().__init__(masters)
        self._dtype, self._copies = dtype, copies

    @override
    def __getitem__(self, name: str) -> Tensor | None:  # type: ignore[override]
        master = super().__getitem__(name)
        if master is None or master.dtype is not torch.float32:
            return master
        # The compiler cannot look into inference mode, and is not used in it.
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        kind = (master.requires_grad and torch.is_grad_enabled(), inference)
        copies = self._copies.setdefault(kind, {})
        if master not in copies:
            copies[master] = master.to(self._dtype)
        return copies[master]

    @override
    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        # `torch.func.functional_call` puts back what it has looked up: a copy.
        for copies in self._copies.values():
            value = next((cast(nn.Parameter, master) for master, copy in copies.items() if copy is value), value)
        super().__setitem__(name, value)

    @override
    def __reduce__(self) -> tuple[type[dict], tuple[list[tuple[str, nn.Parameter | None]]]]:  # type: ignore[type-arg]
        # A module copied in the middle of a step is an ordinary one.
        return dict, (list(self.items()),)


class WeightCopies:
    """The copies of one module; norm layers and computed weights keep their FP32 parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self._copies: _Copies = {}
        self._active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Copies stand in; made when first read, then shared by everything inside."""
        if self._active:
            # Manual optimization: backward runs inside the step.
            yield
            return
        replaced = [
            (layer, layer._parameters)
            for layer in self._module.modules()
            if layer._parameters and not isinstance(layer, _IN_FP32)
        ]
        for layer, masters in replaced:
            layer.__dict__["_parameters"] = _Parameters(masters, self._dtype, self._copies)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for layer, masters in replaced:
                layer.__dict__["_parameters"] = masters
            self.refresh()

    def refresh(self) -> None:
        """Forgets the copies: the masters have changed."""
        self._copies.clear()


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
