"""16-bit products on a CPU: computed in FP32 and rounded once, as on the tensor cores of a GPU.

    FP16 x FP16 --upcast, exact--> FP32 product, FP32 sum --round--> FP16

torch has FP16 and BF16 kernels for every CPU, but a training step with them takes some 20 times as long as one in FP32
(benchmarks/precision.py). The exception is BF16 on a CPU that has units for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fourmin._lightning import TorchDispatchMode, aten_op

_ATTENTION = aten_op("_scaled_dot_product_flash_attention_for_cpu")
_MAX_POOL = aten_op("max_pool2d_with_indices")
_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
_PRODUCTS = {
    _ATTENTION,
    aten_op("_scaled_dot_product_flash_attention_for_cpu_backward"),
    # Attention layers use these two fused kernels in evaluation.
    aten_op("_native_multi_head_attention"),
    aten_op("_transformer_encoder_layer_fwd"),
    aten_op("convolution"),
    aten_op("convolution_backward"),
    *map(aten_op, _MATRIX_PRODUCTS),
    # Pooling is not a product, but as slow in 16 bit, and exact in FP32 as well.
    _MAX_POOL,
} - {None}
HALVES = (torch.float16, torch.bfloat16)
"""The 16-bit dtypes."""
_BF16_UNITS = ("avx512_bf16", "bf16")
"""The names that `torch.cpu.get_capabilities` has for units that multiply in BF16, on x86 and ARM."""


def needs_cpu_half_ops(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own 16-bit kernels are slow or not reliable on a device.

    Units for FP16 do not make a step fast: with avx512_fp16 the backward pass of a convolution takes a hundred times as
    long as in FP32. Some virtual machines report AMX units that they do not have, and a product in BF16 would end the
    process.
    """
    if device.type != "cpu":
        return False
    found = torch.cpu.get_capabilities()
    return dtype is torch.float16 or bool(found.get("amx_tile")) or not any(map(found.get, _BF16_UNITS))


class CpuHalfOps(TorchDispatchMode):
    """While this mode is active, products of FP16 or BF16 CPU tensors run in FP32 and are rounded to their dtype.

    The mode is active in the thread that enters it. The backward pass of CPU tensors runs in the thread that starts it,
    so that thread has to enter the mode for the backward pass, too. A net compiled with `torch.compile` runs uncompiled
    in this mode. Only one thread may use an object, because its products share buffers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: dict[int, Tensor] = {}
        """FP32 memory for each position of an argument. It is kept from product to product, because new memory costs
        more time than the cast into it."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return self._in_fp32(func, args, kwargs)
        # In inference mode composite operations (linear, matmul, attention) arrive here whole. `decompose` runs them as
        # their products, which arrive here again.
        if torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _in_fp32(self, product: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if product is _MAX_POOL and _is_half(args[0]) and args[0].dim() == 4 and args[0].is_contiguous():
            return self._max_pool(*args, **kwargs)
        values = (*args, *kwargs.values())
        dtype = next((value.dtype for value in values if _is_half(value)), None)
        if dtype is None:
            return product(*args, **kwargs)
        raised = [self._raise(value, i) if _is_half(value) else value for i, value in enumerate(values)]
        result = product(*raised[: len(args)], **dict(zip(kwargs, raised[len(args) :], strict=True)))
        if isinstance(result, Tensor):
            return result.to(dtype)
        if product is _ATTENTION:
            # The logarithms of the softmax's sums, which backward reads, are FP32 in torch's 16-bit kernels, too.
            output, log_sums = result
            return output.to(dtype), log_sums
        return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in result)

    def _max_pool(self, images: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Pools in channels-last order: even with two changes of order that is several times faster in torch."""
        _, channels, height, width = images.shape
        strides = (channels * height * width, 1, width * channels, channels)
        maxima, indices = _MAX_POOL(self._raise(images, 0, strides), *args, **kwargs)
        return maxima.to(images.dtype, memory_format=torch.contiguous_format), indices.contiguous()

    def _raise(self, tensor: Tensor, position: int, strides: tuple[int, ...] | None = None) -> Tensor:
        """Returns the tensor in FP32, in its own strides or in those of another dense order.

        The result is valid until the next product, which uses the same memory.
        """
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return tensor.float()
        buffer = self._buffers.get(position)
        if buffer is None or buffer.numel() < tensor.numel():
            # A buffer that is made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[position] = torch.empty(tensor.numel(), dtype=torch.float32)
        return buffer.as_strided(tensor.shape, strides or tensor.stride()).copy_(tensor)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALVES and value.device.type == "cpu"
