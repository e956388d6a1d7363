"""The profile of a module on a device that is not at hand, from the FLOPs and bytes of every operation.

An operation takes as long as its FLOPs or its bytes need at the device's peak rates, whichever is more. How far a
device stays below its peaks is one factor for the whole step; `predict.py` gets that factor from a known throughput.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_fourmin._lightning import TorchDispatchMode, tree_leaves
from lightning_fourmin.errors import PlanError
from lightning_fourmin.simulate.layer_profile import ARGUMENT_ERRORS, Loss, Profile, batch_size_of, profile_of, record

UPDATE_BYTES_A_PARAMETER = 5 * 4
"""SGD with momentum in FP32 reads weight, gradient and momentum, and writes weight and momentum."""


@dataclass(frozen=True)
class Device:
    """The peak rates of a device. If a throughput is known, only the ratio of the rates matters."""

    tflops: float
    memory_gb_per_s: float

    def seconds(self, num_flops: float, num_bytes: float) -> float:
        """How long an operation takes that computes so much and moves so many bytes."""
        return max(num_flops / (1e12 * self.tflops), num_bytes / (1e9 * self.memory_gb_per_s))


def peak_profile(
    module: nn.Module, inputs: Tensor | Sequence[Any], device: Device, loss: Loss | None = None
) -> Profile:
    """The profile of `module` on a device that works at its peak rates.

    A copy of the module runs on the meta device, where tensors have shapes but no values. Module and inputs may be on
    that device themselves.
    """
    replica = _on_meta(module).train()
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    shapes = [value.to("meta") if isinstance(value, Tensor) else value for value in given]
    try:
        with _WorkClock(device) as clock:
            marks = record(replica, shapes, loss, clock.mark)
    except ARGUMENT_ERRORS as error:
        shape = next(tuple(value.shape) for value in shapes if isinstance(value, Tensor))
        raise PlanError(
            f"{type(module).__name__} cannot be traced with an input of {shape} ({type(error).__name__}: {error}): "
            "check the input's shape; a module whose control flow depends on values has to be measured instead "
            "(layer_times=measured)"
        ) from error
    num_parameters = sum(p.numel() for p in replica.parameters() if p.requires_grad)
    update_s = device.seconds(0, UPDATE_BYTES_A_PARAMETER * num_parameters)
    source = f"FLOPs and bytes at {device.tflops:g} TFLOP/s and {device.memory_gb_per_s:g} GB/s"
    return profile_of([marks], update_s, replica, batch_size_of(inputs), source)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module without values."""
    # `module.to("meta")` would make two weights of one that two layers share.
    replicas: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()
    }
    replicas |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    return copy.deepcopy(module, replicas)


class _WorkClock(TorchDispatchMode):
    """A clock that each operation advances by the time that the operation takes at the device's peak rates."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._now_s = device, 0.0

    def mark(self) -> float:
        """The seconds that all operations so far have taken."""
        return self._now_s

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            formula = flop_registry.get(func.overloadpacket)
            num_flops = 0 if formula is None else formula(*args, **(kwargs or {}), out_val=result)
            touched = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
            self._now_s += self._device.seconds(num_flops, sum(value.nbytes for value in touched))
        return result
