"""16-bit copies that take the place of a module's FP32 parameters in a step, and the norm layers that keep FP32.

in a step           layer.weight       -> a 16-bit copy; the cast is in the graph, so the master gets an FP32 gradient
                    layer.parameters() -> the FP32 masters, as for optimizers, state_dict and regularisers
outside of a step   both               -> the FP32 masters

A norm layer between 16-bit layers reads FP32 parameters and statistics, computes in FP32 and returns 16 bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fourmin._lightning import (
    BatchNormBase,
    InstanceNormBase,
    NormBase,
    parameters_by_name,
    set_parameters_by_name,
)
from lightning_fourmin.precision.cpu_half_ops import HALVES

NORM_LAYERS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""The classes of norm layers. Subclasses count: a layer is known by its type, whatever its `forward` does."""
_MIXED_FORWARDS = {cls.forward for cls in (BatchNormBase, nn.SyncBatchNorm, InstanceNormBase)}
"""The `forward` methods that call kernels which read 16-bit activations and compute in FP32. On a GPU these kernels
save memory traffic; on a CPU they are slower than two casts."""
_IN_FP32 = (*NORM_LAYERS, ParametrizationList)
"""The classes of layers that read the masters. Parametrizations are among them: a weight that is computed from other
tensors (spectral norm) is computed in FP32, and the product that uses it rounds the result."""
_Copies = dict[tuple[bool, bool], dict[Tensor, Tensor]]
"""The copies by their kind (whether they need gradients, whether inference mode made them) and master. Tied weights
share a copy."""


class WeightCopies:
    """The 16-bit copies of one module's FP32 parameters.

    Autocast alone would cast each weight where a product reads it, and in manual optimization, where an optimizer steps
    inside of a training step, its cache would keep copies of the old weights. Casting the parameters for good would
    need a second set of tensors for optimizers, checkpoints and callbacks. So the parameters stay the masters, and only
    the look-up of `layer.weight` changes, and only while a step runs.

    A copy is made when it is first read and is valid until the masters change: `refresh` forgets all copies. Two
    threads use this object, never at the same time: the one that runs the step, and, while that waits for the backward
    pass, the thread of autograd that computes checkpointed activations again.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self._copies: _Copies = {}
        self._active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Lets layers read copies while the context is open; a context inside of it shares its copies."""
        if self._active:
            # In manual optimization the backward pass runs inside of the step.
            yield
            return
        replaced = [
            (layer, parameters_by_name(layer))
            for layer in self._module.modules()
            if parameters_by_name(layer) and not isinstance(layer, _IN_FP32)
        ]
        for layer, masters in replaced:
            set_parameters_by_name(layer, _Parameters(masters, self._dtype, self._copies))
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for layer, masters in replaced:
                set_parameters_by_name(layer, masters)
            self.refresh()

    def refresh(self) -> None:
        """Forgets the copies, because the masters have changed."""
        self._copies.clear()


class _Parameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` during a step: a look-up by name gives a copy, iteration gives the masters."""

    def __init__(self, masters: dict[str, nn.Parameter | None], dtype: torch.dtype, copies: _Copies) -> None:
        super().__init__(masters)
        self._dtype, self._copies = dtype, copies

    @override
    def __getitem__(self, name: str) -> Tensor | None:  # type: ignore[override]
        master = super().__getitem__(name)
        if master is None or master.dtype is not torch.float32:
            return master
        # torch.compile cannot trace the question for inference mode, and is not used in it.
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        kind = (master.requires_grad and torch.is_grad_enabled(), inference)
        copies = self._copies.setdefault(kind, {})
        if master not in copies:
            copies[master] = master.to(self._dtype)
        return copies[master]

    @override
    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        # `torch.func.functional_call` puts back what it has looked up, which is a copy: put back the master instead.
        for copies in self._copies.values():
            value = next((cast(nn.Parameter, master) for master, copy in copies.items() if copy is value), value)
        super().__setitem__(name, value)

    @override
    def __reduce__(self) -> tuple[type[dict], tuple[list[tuple[str, nn.Parameter | None]]]]:  # type: ignore[type-arg]
        # A module that is copied or pickled in the middle of a step becomes an ordinary one, with the masters.
        return dict, (list(self.items()),)


def tensors_of_norms(module: nn.Module) -> set[Tensor]:
    """Returns the parameters and buffers of all norm layers of a module."""
    layers = (layer for layer in module.modules() if isinstance(layer, NORM_LAYERS))
    return {t for layer in layers for t in chain(layer.parameters(recurse=False), layer.buffers(recurse=False))}


def keep_norms_in_fp32(module: nn.Module) -> list[RemovableHandle]:
    """Gives all norm layers of a module hooks that cast inputs and outputs; float64 stays as it is."""
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
    # Outside of a step autocast is off, and a norm layer returns what it returns in FP32 training.
    if isinstance(output, Tensor) and output.dtype is torch.float32 and torch.is_autocast_enabled(output.device.type):
        return output.to(torch.get_autocast_dtype(output.device.type))
    return output
