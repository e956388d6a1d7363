"""Where the division by the world size happens, so that 16-bit sums neither overflow nor underflow.

gradient * before -> [sum * reduce] -> [sum * scatter] -> * after -> mean gradient
"""

import math
from dataclasses import dataclass

import torch

from lightning_fourmin.allreduce.topology import Topology


@dataclass(frozen=True)
class Scales:
    """Factors of one all-reduce; with a value from every rank they multiply to 1 / world size."""

    before: float
    reduce: float
    """On the sum inside a group, before it is rounded to the wire's dtype."""
    scatter: float
    """On the sum between groups, before it is rounded."""
    after: float


def scales(topology: Topology, wire_dtype: torch.dtype, predivide: float | None, local_sums: bool) -> Scales:
    """Factors for a wire dtype; `local_sums`: our own FP32 sums rather than the backend's in the wire's dtype.

    FP32 divides by the world size first, as DDP does. In 16 bit our own sums travel as averages: what each rank
    holds never leaves the range of the gradients. The backend's sums get a power of two near sqrt(world) before and
    the rest after, which leaves as much room above as below.
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
