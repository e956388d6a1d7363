"""Tensor fusion: which gradients travel together, as buckets in the order in which backward makes them ready.

backward order   fc8.bias  fc8.weight     fc7.bias  fc7.weight ...  conv1.bias  conv1.weight
bucket           [ pooled until it passes the threshold ]  [ above it: alone, or with the little before it ]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_fourmin._lightning import buckets_of_ddp
from lightning_fourmin.text import dtype_name

MIB = 1024 * 1024
SMALL_SHARE = 1 / 16
"""A pool up to this share of the threshold waits for the large gradient after it, as a bias does for its weight."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    names: tuple[str, ...]
    """Names of the parameters, in ready order."""
    num_bytes: int
    """Bytes of the gradients in their own dtype."""
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.num_bytes // self.dtype.itemsize

    @property
    def content(self) -> str:
        """What is in the bucket, for people: `fc.weight` or `conv2.bias .. conv1.weight`."""
        first, last = self.names[0], self.names[-1]
        return first if first == last else f"{first} .. {last}"


@dataclass(frozen=True)
class FusionPlan:
    """Buckets in ready order and the caps that make DistributedDataParallel cut exactly there."""

    buckets: tuple[Bucket, ...]
    caps_mb: tuple[float, ...]
    """`bucket_cap_mb_list` for DistributedDataParallel."""
    threshold_bytes: int
    """A pool of gradients closes when it passes this size."""

    @classmethod
    def build(
        cls, parameters: Sequence[tuple[str, nn.Parameter]], threshold_mb: float, rebuilt: bool = True
    ) -> "FusionPlan":
        """Plans for parameters in registration order, expected ready in the reverse order.

        `rebuilt` says that DDP cuts anew in ready order after the first backward; with `find_unused_parameters` it
        keeps the cut that it made in registration order. A pooled bucket closes when it passes the threshold; a
        gradient above the threshold closes the pool and goes alone, or takes it along if that is small. DDP knows one
        list of caps for all dtypes: the list is made for the dtype with the most bytes, and the plan tells what the
        others get.
        """
        threshold_bytes = int(threshold_mb * MIB)
        caps = _cut(_ready_sizes(parameters), threshold_bytes)
        # DDP closes a bucket when it reaches its cap, so a cap of 0 (only empty tensors) would never be a limit.
        limits = [max(cap, 1) for cap in (caps if rebuilt else reversed(caps))]
        return cls(_ddp_buckets(parameters, limits, rebuilt), tuple(limit / MIB for limit in limits), threshold_bytes)


def refuse_sparse_gradients(module: nn.Module) -> None:
    """ValueError for an embedding whose gradients are sparse."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"{name} makes sparse gradients, which fused buckets cannot carry: build it with sparse=False, or use "
                "strategy='ddp'"
            )


def refuse_complex_gradients(module: nn.Module, wire_dtype: torch.dtype | None) -> None:
    """ValueError for complex gradients that a wire dtype would make real."""
    for name, parameter in module.named_parameters():
        if wire_dtype is not None and parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"{name} has complex gradients, which do not fit into {dtype_name(wire_dtype)} on the "
                "wire: leave wire_dtype out, with precision='32-true', or use strategy='ddp'"
            )


def wire_bytes(module: nn.Module, wire_dtype: torch.dtype | None) -> int:
    """Bytes that a step of the module puts on the wire; with `wire_dtype=None` gradients go in their own dtype."""
    return sum(p.numel() * (wire_dtype or p.dtype).itemsize for p in module.parameters() if p.requires_grad)


def _ready_sizes(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
    """Bytes of the gradients that caps are made for, in ready order: those of the dtype with the most bytes."""
    sizes: dict[torch.dtype, list[int]] = {}
    for _, parameter in parameters:
        sizes.setdefault(parameter.dtype, []).append(parameter.nbytes)
    return max(sizes.values(), key=sum)[::-1]


def _cut(sizes: Sequence[int], threshold_bytes: int) -> list[int]:
    """Bytes of each bucket for gradients of `sizes` in ready order."""
    buckets = [0]
    for size in sizes:
        is_full = buckets[-1] > threshold_bytes
        if is_full or (size > threshold_bytes and buckets[-1] > SMALL_SHARE * threshold_bytes):
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _ddp_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], limits: list[int], rebuilt: bool
) -> tuple[Bucket, ...]:
    """The buckets that DDP makes of these limits, as torch's own function answers."""
    order = parameters[::-1] if rebuilt else parameters
    tensors: list[torch.Tensor] = [parameter for _, parameter in order]
    # With indices torch keeps the order that a rebuild gives, which is not the ready order where dtypes are mixed.
    indices = list(range(len(tensors))) if rebuilt else []
    assignment = buckets_of_ddp(tensors, limits, [False] * len(tensors), indices)
    buckets = []
    for members in assignment if rebuilt else reversed(assignment):
        names, together = zip(*(order[i] for i in members), strict=True)
        buckets.append(Bucket(names, sum(parameter.nbytes for parameter in together), together[0].dtype))
    return tuple(buckets)
