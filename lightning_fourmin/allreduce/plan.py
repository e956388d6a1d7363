"""The communication plan: how every gradient travels, decided in one place and used by everyone.

    options + module + topology + table + precision  --decide-->  CommPlan  --> strategy, engine   carry it out
                                                                            --> tune, simulate     time it, predict it
                                                                            --> record, page       show it

A row is a bucket of DDP: what is in it, its form, its all-reduce, its pieces, its bytes on the wire, the milliseconds
that the table expects, and how exact the result is. Only the size and dtype of a bucket decide how it travels. So
`send` also answers for buckets that no row has: those of the first step, which DDP cuts in another order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_fourmin.allreduce.algorithms import ALGORITHMS, Algorithm, algorithm_of
from lightning_fourmin.allreduce.buckets import MIB, Bucket, FusionPlan
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.text import dtype_name, plural, readable_size

WIRE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What the options call the dtypes of the wire."""
HYBRID = "hybrid"
"""The option that leaves the algorithm of each bucket to the table."""
SHORT_ROWS = 12
"""Rows of a plan that people read in a terminal without scrolling."""

BIT_EQUAL = "bit-equal to ddp"
SUMMATION_ORDER = "equal up to the order of summation"


@dataclass(frozen=True)
class CommOptions:
    """The arguments of `FourMinStrategy` that decide how gradients travel; its docstring explains them."""

    algorithm: str = HYBRID
    group_size: int | None = None
    fusion_mb: float | None = None
    switch_mb: float | None = None
    table: str | Path | None = None
    wire_dtype: str | None = None
    predivide: float | None = None
    stall_warning_s: float = 30
    trace: bool = False

    def __post_init__(self) -> None:
        for name, choices in {"algorithm": (HYBRID, *ALGORITHMS), "wire_dtype": (None, *WIRE_DTYPES)}.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is not known: choose one of {', '.join(map(repr, choices))}")
        for name in ("group_size", "fusion_mb", "switch_mb", "predivide", "stall_warning_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a number above 0, got {value!r}: leave it out for the default")
        if self.group_size is not None and not isinstance(self.group_size, int):
            raise ValueError(f"group_size must be a whole number of ranks, got {self.group_size!r}")
        if self.switch_mb is not None and self.algorithm != HYBRID:
            raise ValueError(
                f"switch_mb is the switch of algorithm='hybrid', but algorithm is {self.algorithm!r}: drop one"
            )

    def wire(self, compute_dtype: torch.dtype | None = None) -> torch.dtype | None:
        """The wire's dtype: as set, else what a precision plugin computes in, else None for the gradients' own."""
        return compute_dtype if self.wire_dtype is None else WIRE_DTYPES[self.wire_dtype]


@dataclass(frozen=True)
class Sending:
    """How a bucket of one size travels."""

    algorithm: Algorithm
    wire_dtype: torch.dtype
    numels: tuple[int, ...]
    """Number of gradients in each piece, in order."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(self.piece_bytes)

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """Bytes of each piece on the wire."""
        return tuple(numel * self.wire_dtype.itemsize for numel in self.numels)


@dataclass(frozen=True)
class PlanRow:
    """One bucket of the plan."""

    bucket: Bucket
    sending: Sending
    expected_ms: float | None
    """What the table expects of its all-reduce alone; None if `switch_mb` chose one that the table does not have."""
    exactness: str
    """How the mean compares with that of plain DDP, in one of a few fixed phrases."""
    form: str = "dense"
    """The form in which the gradients travel."""
    update: str = "replicated"
    """Who updates the weights: every rank all of them."""

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON: plan.json and the record of a run have these names."""
        bucket, sending = self.bucket, self.sending
        return {
            "num_tensors": len(bucket.names),
            "num_bytes": bucket.num_bytes,
            "dtype": dtype_name(bucket.dtype),
            "first": bucket.names[0],
            "last": bucket.names[-1],
            "wire_bytes": sending.num_bytes,
            "wire_dtype": dtype_name(sending.wire_dtype),
            "form": self.form,
            "update": self.update,
            "algorithm": sending.algorithm.name,
            "num_pieces": len(sending.numels),
            "expected_ms": None if self.expected_ms is None else round(self.expected_ms, 4),
            "exactness": self.exactness,
        }


@dataclass(frozen=True)
class CommPlan:
    """How every gradient of a module travels, in the order in which backward makes the buckets ready."""

    topology: Topology
    """The ranks in the groups that they meet in, which the tuner may have found."""
    table: AllReduceTable
    """What chooses the all-reduce of a size, narrowed to what the options allow."""
    wire_dtype: torch.dtype | None = None
    """The dtype of gradients on the wire; None: their own."""
    predivide: float | None = None
    """The factor that gradients are divided by before the sum; None: see `predivide.py`."""
    fusion: FusionPlan | None = None
    """The buckets and the caps that make DDP cut them; None where DDP cuts by itself."""
    _sendings: dict[tuple[int, torch.dtype], Sending] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What `send` has answered: the engine asks again in every step."""

    @classmethod
    def decide(
        cls,
        options: CommOptions,
        topology: Topology,
        backend: str,
        table: AllReduceTable | None = None,
        parameters: Sequence[tuple[str, nn.Parameter]] = (),
        compute_dtype: torch.dtype | None = None,
        rebuilt: bool = True,
    ) -> "CommPlan":
        """The plan for some options.

        Args:
            options: what the user has set.
            topology: who is where; the table may bring other groups.
            backend: name of the backend of torch.distributed.
            table: a measured table; None: the cost model.
            parameters: those that DDP reduces, in registration order; without any, DDP cuts the buckets by itself.
            compute_dtype: what a precision plugin computes in; the wire's dtype unless the options set one.
            rebuilt: whether DDP cuts its buckets anew after the first backward (see `FusionPlan.build`).
        """
        table = table or AllReduceTable.from_cost_model(topology, backend)
        topology = table.groups_of(topology)
        fusion = None
        if parameters:
            threshold_mb = options.fusion_mb or table.fusion_mb or default_fusion_mb(topology, backend)
            fusion = FusionPlan.build(parameters, threshold_mb, rebuilt)
        if options.switch_mb is not None:
            table = table.with_switch(int(options.switch_mb * MIB))
        elif options.algorithm != HYBRID:
            table = table.only(options.algorithm)
        return cls(topology, table, options.wire(compute_dtype), options.predivide, fusion)

    def send(self, numel: int, dtype: torch.dtype) -> Sending:
        """How a bucket of so many gradients travels: the same pieces for everyone who asks."""
        if (known := self._sendings.get((numel, dtype))) is not None:
            return known
        wire_dtype = self.wire_dtype or dtype
        num_bytes = numel * wire_dtype.itemsize
        name = self.table.choose(num_bytes)
        num_pieces = max(1, min(numel, self.table.num_pieces(name, num_bytes)))
        # As `Tensor.tensor_split` cuts: the first pieces are one larger where the number does not divide evenly.
        smaller, num_larger = divmod(numel, num_pieces)
        numels = tuple(smaller + (number < num_larger) for number in range(num_pieces))
        return self._sendings.setdefault((numel, dtype), Sending(algorithm_of(name), wire_dtype, numels))

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """A row for each bucket, in ready order; none where DDP cuts by itself."""
        rows = []
        for bucket in self.fusion.buckets if self.fusion is not None else ():
            sending = self.send(bucket.numel, bucket.dtype)
            expected_ms = self.table.expected_ms(sending.num_bytes).get(sending.algorithm.name)
            rows.append(PlanRow(bucket, sending, expected_ms, self._exactness(bucket.dtype)))
        return tuple(rows)

    def _exactness(self, dtype: torch.dtype) -> str:
        wire_dtype = self.wire_dtype or dtype
        if wire_dtype.itemsize < dtype.itemsize:
            return f"rounded to {next(name for name, other in WIRE_DTYPES.items() if other is wire_dtype)}"
        # A sum of two numbers does not depend on their order, and DDP divides before it sums, as the engine does.
        exact = self.topology.world_size <= 2 and self.predivide is None and wire_dtype.itemsize >= 4
        return BIT_EQUAL if exact else SUMMATION_ORDER

    @property
    def exactness(self) -> str:
        """How exact all rows are, for one line."""
        return ", ".join(dict.fromkeys(row.exactness for row in self.rows)) or self._exactness(torch.float32)

    def summary(self) -> str:
        """The plan in one line: the first line of a fit."""
        wire = dtype_name(self.wire_dtype) if self.wire_dtype is not None else "gradients' dtype"
        buckets = "as DDP cuts them" if self.fusion is None else str(len(self.fusion.buckets))
        return (
            f"{self.topology}; buckets: {buckets}; wire: {wire}, {self.exactness}; all-reduce ({self.table.source}): "
            f"{self.table.summary()}"
        )

    def explain(self, most_rows: int | None = None) -> str:
        """The plan as a table for people, with a line for each bucket.

        If there are more than `most_rows` buckets, the first and the last ones are shown, and a line between them says
        how many are left out.
        """
        if not self.rows:
            return "DDP cuts the buckets by itself"
        num_left_out = 0 if most_rows is None else max(0, len(self.rows) - most_rows)
        num_first = (len(self.rows) - num_left_out) // 2
        shown = list(enumerate(self.rows))
        del shown[num_first : num_first + num_left_out]
        lines = [("", "what", "tensors", "on the wire", "form", "all-reduce", "expected", "exactness")]
        for index, row in shown:
            pieces = f" in {len(row.sending.numels)} pieces" if len(row.sending.numels) > 1 else ""
            lines.append(
                (
                    str(index),
                    row.bucket.content,
                    str(len(row.bucket.names)),
                    readable_size(row.sending.num_bytes),
                    row.form,
                    f"{row.sending.algorithm.name}{pieces}",
                    "" if row.expected_ms is None else f"{row.expected_ms:.2f} ms",
                    row.exactness,
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        if num_left_out:
            texts.insert(1 + num_first, f"... {plural(num_left_out, 'bucket')} left out")
        return "\n".join(texts)
