"""16-bit copies that stand in for a module's FP32 parameters while a step runs.

in a step           layer.weight       -> a 16-bit copy; its cast is in the graph: FP32 gradients reach the master
                    layer.parameters() -> the FP32 masters, as for optimizers, state_dict and regularisers
outside of a step   both               -> the FP32 masters
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from typing_extensions import override

from lightning_fourmin.precision.norm_layers import NORM_LAYERS

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


class StandIns:
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
