"""LARS (You et al. 2017): momentum SGD in which the norms of each tensor's weights and gradient scale its rate.

    ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps),  1 where |w| or |g| is 0

    form "mlperf":  v = momentum * v + lr * ratio * (g + weight_decay * w);  w -= v
    form "torch":   v = momentum * v +      ratio * (g + weight_decay * w);  w -= lr * v

The forms differ when the rate changes: in "mlperf" each gradient in v keeps the rate of its own step.

On a CPU a step is bound by memory. So tensors are updated one by one: the norms are computed, and torch's fused SGD
kernel does the update while the tensor is still in the cache. On other devices all tensors of a device and dtype are
updated together by `_foreach_` operations, and nothing waits for the device.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_fourmin._lightning import foreach_add, foreach_add_, foreach_mul_, foreach_norm, fused_sgd_

FORMS = ("mlperf", "torch")
SMALLEST_FUSED_SCALE = 2.0**-26
"""The smallest scale that the fused kernel gets. The kernel takes 1 - scale, in FP64: a smaller scale would lose more
digits in that than FP32 rounds away."""
NORM_BLOCK = 1024
"""The number of elements that torch's CPU norm may add up at once: in a whole tensor its FP32 sums are off, by 0.2 % at
38 million elements."""
_vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm


class LARS(Optimizer):
    """LARS in the form of the MLPerf reference ("mlperf") or of most PyTorch libraries ("torch").

    With a large batch and a rate to match, plain SGD moves some layers by more than their own size and diverges. LARS
    bounds the update of each tensor relative to its weights, so that one rate suits all layers.

    Every parameter gets a trust ratio. Biases and norm layers should have none: `LARS(fm.param_groups(module,
    weight_decay), lr=...)` leaves them out. A group with `trust_coefficient=None` has no ratio and trains with the full
    rate. The fused kernel and the `_foreach_` operations give the same weights, up to the rounding of FP32.

    Args:
        params: Parameters, named parameters or groups of them; a group may set every option below for itself.
        lr: Learning rate, a number that schedulers change.
        momentum: From 0 (no buffer) to below 1.
        weight_decay: Is added to the gradient as `weight_decay * w`, inside the ratio as well.
        trust_coefficient: The size of an update relative to its weights at lr 1. None means no trust ratio.
        eps: Is added to the denominator of the ratio.
        form: With "mlperf" the momentum buffer holds updates; with "torch" it holds gradients, and lr multiplies it.
        nesterov: Whether to look ahead by one step of momentum.

    Example:
        ```python
        LARS(param_groups(module, weight_decay=2e-4), lr=10.0)  # MLPerf's rate for a batch of 4096
        ```
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float | None = 0.001,
        eps: float = 1e-7,
        form: Literal["mlperf", "torch"] = "mlperf",
        nesterov: bool = False,
    ) -> None:
        self._last_ratios: list[tuple[list[Tensor], Tensor | list[float]]] = []
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps, "form": form}
        super().__init__(params, options | {"trust_coefficient": trust_coefficient, "nesterov": nesterov})

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last_ratios = []

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_options(self.defaults | param_group, len(self.param_groups))
        super().add_param_group(param_group)

    def trust_ratios(self) -> dict[str, float]:
        """Returns the ratios of the last step by parameter name; parameters without ratio or gradient are left out.

        Parameters that came without names are called `group0.param3`. The call waits for the device, once a group.
        """
        of_param: dict[Tensor, float] = {}
        for params, ratios in self._last_ratios:
            of_param.update(zip(params, ratios.tolist() if isinstance(ratios, Tensor) else ratios, strict=True))
        return {
            _name(group, number, i): of_param[param]
            for number, group in enumerate(self.param_groups)
            for i, param in enumerate(group["params"])
            if param in of_param
        }

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient; a closure runs before that, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._last_ratios = []
        for number, group in enumerate(self.param_groups):
            fused: list[_Slot] = []
            rest: list[_Slot] = []
            for slot in self._slots(group, number):
                (fused if not group["nesterov"] and _fits_fused_kernel(slot) else rest).append(slot)
            if fused:
                rest += self._update_fused(group, fused)
            for batch in _batches(rest):
                self._update_batch(group, batch)
        return loss

    def _slots(self, group: dict[str, Any], number: int) -> Iterator["_Slot"]:
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{_name(group, number, i)} has a sparse gradient, which LARS cannot use: build its layer with "
                    "sparse=False, or give the parameter to another optimizer"
                )
            buffer = None
            if group["momentum"]:
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                buffer = state["momentum_buffer"]
            yield _Slot(param, param.grad, buffer)

    def _update_fused(self, group: dict[str, Any], slots: list["_Slot"]) -> list["_Slot"]:
        """Updates in one pass over each tensor and returns the slots whose scale the kernel cannot take.

        torch's fused SGD kernel computes, for plain SGD with dampening d:

            v = momentum * v + (1 - d) * (g + weight_decay * w);  w -= lr * v

        LARS needs a factor, the scale, where SGD has 1 - d. So d = 1 - scale, and the kernel does the whole step: one
        pass in which w, g and v are read once, instead of one pass to scale the gradient and one to update. Without
        momentum the kernel ignores d; there is no v either, and the scale goes into lr.
        """
        momentum, left = group["momentum"], []
        adapted = group["trust_coefficient"] is not None
        # Tensors with a ratio are updated one by one: the update finds in the cache what the norms have read.
        for batch in [[slot] for slot in slots] if adapted else [slots]:
            ratio = _ratio_on_host(group, batch[0]) if adapted else 1.0
            scale, rate = _scale_and_rate(group, ratio)
            # "not >=" instead of "<" keeps a NaN scale from the kernel as well.
            if momentum and not scale >= SMALLEST_FUSED_SCALE:
                left += batch
                continue
            params, buffers = [slot.param for slot in batch], [slot.buffer for slot in batch if slot.buffer is not None]
            assert fused_sgd_ is not None  # or no slot would have come here
            fused_sgd_(
                params,
                [slot.grad for slot in batch],
                buffers,
                weight_decay=group["weight_decay"],
                momentum=momentum,
                lr=rate if momentum else rate * scale,
                dampening=1.0 - scale,
                nesterov=False,
                maximize=False,
                # In a first step the kernel would copy the gradient into v, without d. Our buffers begin as zeros.
                is_first_step=False,
            )
            # Autograd does not see what this kernel changes, and would accept saved tensors that have changed.
            torch.autograd.graph.increment_version([*params, *buffers])
            if adapted:
                self._last_ratios.append((params, [ratio]))
        return left

    def _update_batch(self, group: dict[str, Any], slots: list["_Slot"]) -> None:
        """Updates tensors of one device and dtype without waiting for the device."""
        params, grads = [slot.param for slot in slots], [slot.grad for slot in slots]
        buffers = [slot.buffer for slot in slots if slot.buffer is not None]
        ratios: Tensor | float = 1.0
        if group["trust_coefficient"] is not None:
            ratios = _ratios(group, norms(params), norms(grads))
            self._last_ratios.append((params, ratios))
        scales, rate = _scale_and_rate(group, ratios)
        updates = foreach_add(grads, params, alpha=group["weight_decay"])
        foreach_mul_(updates, scales.unbind() if isinstance(scales, Tensor) else scales)
        if group["momentum"]:
            foreach_mul_(buffers, group["momentum"])
            foreach_add_(buffers, updates)
            if group["nesterov"]:
                foreach_add_(updates, buffers, alpha=group["momentum"])
        foreach_add_(params, updates if group["nesterov"] or not buffers else buffers, alpha=-rate)


class _Slot(NamedTuple):
    """A parameter with its gradient and, if there is momentum, its buffer."""

    param: Tensor
    grad: Tensor
    buffer: Tensor | None


def _scale_and_rate(group: dict[str, Any], ratio: Any) -> tuple[Any, float]:
    """Returns the factor of a gradient on its way into the buffer, and that of the buffer on its way to the weights."""
    return (group["lr"] * ratio, 1.0) if group["form"] == "mlperf" else (ratio, group["lr"])


def _ratios(group: dict[str, Any], weight_norms: Tensor, grad_norms: Tensor) -> Tensor:
    denominators = grad_norms + group["weight_decay"] * weight_norms + group["eps"]
    has_ratio = (weight_norms > 0) & (grad_norms > 0)
    return torch.where(has_ratio, group["trust_coefficient"] * weight_norms / denominators, 1.0)


def _ratio_on_host(group: dict[str, Any], slot: _Slot) -> float:
    weight_norm, grad_norm = float(cpu_norm(slot.param)), float(cpu_norm(slot.grad))
    if not (weight_norm > 0 and grad_norm > 0):
        return 1.0
    denominator = grad_norm + group["weight_decay"] * weight_norm + group["eps"]
    return float(group["trust_coefficient"] * weight_norm / denominator)


def _fits_fused_kernel(slot: _Slot) -> bool:
    """Whether torch's fused SGD kernel for CPUs gives the right result for these tensors.

    The kernel takes memory as it lies, whatever the strides, and is wrong in 16 bit. In FP64 the scale would lose
    digits.
    """
    param, grad, buffer = slot
    return (
        param.is_cpu
        and param.dtype == grad.dtype == torch.float32
        and param.stride() == grad.stride()
        and (buffer is None or buffer.stride() == param.stride())
        and is_dense(param)
        and fused_sgd_ is not None
    )


def _batches(slots: list[_Slot]) -> list[list[_Slot]]:
    """Groups slots for joint updates: on a CPU each is alone, to stay in the cache; else by device and dtype."""
    batches: dict[Any, list[_Slot]] = defaultdict(list)
    for slot in slots:
        param = slot.param
        batches[param if param.is_cpu else (param.device, param.dtype)].append(slot)
    return list(batches.values())


def _name(group: dict[str, Any], number: int, i: int) -> str:
    return group["param_names"][i] if "param_names" in group else f"group{number}.param{i}"


def _check_options(options: dict[str, Any], number: int) -> None:
    where = f"of param group {number}"
    for field in ("lr", "momentum", "weight_decay", "eps", "trust_coefficient"):
        value = options[field]
        if field == "trust_coefficient" and value is None:
            continue
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{field} {where} must be a finite number of at least 0, got {value!r}")
    if options["momentum"] >= 1:
        raise ValueError(f"momentum {where} must be below 1, got {options['momentum']!r}")
    if options["eps"] == 0:
        raise ValueError(f"eps {where} must be above 0: the MLPerf reference, given 0, takes 1e-7")
    if options["trust_coefficient"] == 0:
        raise ValueError(f"trust_coefficient {where} must be above 0, or None for no trust ratio")
    if options["form"] not in FORMS:
        raise ValueError(f"form {where} must be one of {', '.join(map(repr, FORMS))}, got {options['form']!r}")
    if options["nesterov"] and options["momentum"] == 0:
        raise ValueError(f"nesterov {where} needs a momentum above 0: set momentum, or leave nesterov out")


def norms(tensors: list[Tensor]) -> Tensor:
    """Returns the norms of tensors of one device and dtype, without waiting for the device."""
    if tensors[0].is_cpu:
        return torch.stack([cpu_norm(tensor) for tensor in tensors])
    return torch.stack(foreach_norm(tensors, dtype=torch.promote_types(tensors[0].dtype, torch.float32)))


def cpu_norm(tensor: Tensor) -> Tensor:
    """Returns the norm of a CPU tensor, computed from the norms of its blocks.

    The result is right to FP32's rounding whatever the size of the tensor, and in FP64 for a tensor in FP64.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    num_blocks, num_left = divmod(tensor.numel(), NORM_BLOCK)
    if num_blocks == 0:
        return _vector_norm(tensor, dtype=dtype)
    # The elements are read in the order of memory, which is fast; a norm does not depend on the order.
    dense = tensor if is_dense(tensor) else tensor.contiguous()
    of_blocks = _vector_norm(dense.as_strided((num_blocks, NORM_BLOCK), (NORM_BLOCK, 1)), dim=1, dtype=dtype)
    if num_left:
        left = dense.as_strided((1, num_left), (1, 1), dense.storage_offset() + num_blocks * NORM_BLOCK)
        of_blocks = torch.cat([of_blocks, _vector_norm(left, dim=1, dtype=dtype)])
    return _vector_norm(of_blocks)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills a range of memory without gaps, in one of torch's memory formats."""
    return tensor.is_contiguous() or any(
        tensor.is_contiguous(memory_format=memory_format)
        for memory_format in (torch.channels_last, torch.channels_last_3d)
    )
