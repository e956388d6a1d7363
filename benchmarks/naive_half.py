"""Training with everything in FP16, the optimizer's update included, which FP32 masters are there to avoid.

Only comparisons need it: the rows `*_fp16_naive` of the large-batch table and `examples/fp16_lars_stall.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor
from typing_extensions import override

from lightning_fourmin.precision.cpu_half_ops import CpuHalfOps


class NaiveHalfPrecision(HalfPrecision):
    """Lightning's `16-true` with products as `FourMinPrecision` computes them on CPUs, where torch's take too long."""

    def __init__(self) -> None:
        super().__init__("16-true")
        self._half_ops = CpuHalfOps()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context(), self._half_ops:
            yield

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self._half_ops:
            super().backward(tensor, model, optimizer, *args, **kwargs)
