"""Where gradients are divided by the world size, so that 16-bit sums neither overflow nor underflow.

    gradient * before -> [sum * reduce] -> [sum * scatter] -> * after -> mean gradient

Nothing else divides a gradient: DDP hands its buckets over undivided when a communication hook runs.
"""

import math
from dataclasses import dataclass

import torch

from lightning_fourmin.allreduce.topology import Topology


@dataclass(frozen=True)
class Scales:
    """The factors of one all-reduce; with a gradient from every rank they multiply to 1 / world size."""

    before: float
    """Multiplies the gradients before anything is sent."""
    reduce: float
    """Multiplies the sum inside a group, before it is rounded to the wire's dtype."""
    scatter: float
    """Multiplies the sum between groups, before it is rounded to the wire's dtype."""
    after: float
    """Multiplies the result, in the gradients' own dtype."""


def scales(topology: Topology, wire_dtype: torch.dtype, predivide: float | None, local_sums: bool) -> Scales:
    """The factors for a wire dtype; `local_sums` means our own FP32 sums rather than the backend's in the wire's dtype.

    In FP32 the division by the world size comes first, as in DDP. In 16 bit our own sums travel as averages, so that
    what a rank holds never leaves the range of the gradients. For the backend's sums, gradients are divided by a power
    of two near sqrt(world) before and by the rest after, which leaves as much room for overflow as for underflow.
    """
    world = topology.world_size
    if predivide is not None:
        return Scales(1 / predivide, 1.0, 1.0, predivide / world)
    if wire_dtype.itemsize >= 4:
        return Scales(1 / world, 1.0, 1.0, 1.0)
    if local_sums:
        k, q = topology.largest_group, len(topology.groups)
        return Scales(1.0, 1 / k, 1 / q, k * q / world)
    factor = 2.0 ** math.ceil(math.log2(world) / 2)
    return Scales(1 / factor, 1.0, 1.0, factor / world)
