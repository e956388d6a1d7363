"""What users set of the strategy's communication, checked when it is given."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_fourmin.allreduce.algorithms import ALGORITHMS

WIRE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class CommOptions:
    """The arguments of `FourMinStrategy` that are its own; its docstring explains them."""

    algorithm: str
    group_size: int | None
    fusion_mb: float | None
    switch_mb: float | None
    table: str | Path | None
    wire_dtype: str | None
    predivide: float | None
    stall_warning_s: float
    trace: bool

    def __post_init__(self) -> None:
        self._check_choice("algorithm", ("hybrid", *ALGORITHMS))
        self._check_choice("wire_dtype", (None, *WIRE_DTYPES))
        for field in ("group_size", "fusion_mb", "switch_mb", "predivide", "stall_warning_s"):
            self._check_positive(field)
        if self.group_size is not None and not isinstance(self.group_size, int):
            raise ValueError(f"group_size must be a whole number of ranks, got {self.group_size!r}")
        if self.switch_mb is not None and self.algorithm != "hybrid":
            raise ValueError(
                f"switch_mb is the switch of algorithm='hybrid', but algorithm is {self.algorithm!r}: drop one"
            )

    def _check_choice(self, field: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise ValueError(f"{field}={value!r} is not known: choose one of {', '.join(map(repr, choices))}")

    def _check_positive(self, field: str) -> None:
        value = getattr(self, field)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{field} must be a number above 0, got {value!r}: leave it out for the default")
