"""What FP32 masters are there to avoid: everything in FP16, updates included. For comparisons only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor
from typing_extensions import override

from lightning_fourmin.precision.cpu_half_ops import HalfKernels


class NaiveHalfPrecision(HalfPrecision):
    """Lightning's `16-true`, at a speed that can be waited for on CPUs."""

    def __init__(self) -> None:
        super().__init__("16-true")
        self._kernels = HalfKernels()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context(), self._kernels:
            yield

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self._kernels:
            super().backward(tensor, model, optimizer, *args, **kwargs)
