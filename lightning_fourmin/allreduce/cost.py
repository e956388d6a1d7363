"""The links of a cluster, and what one phase of an all-reduce costs on them.

A message of n bytes takes `latency_s + n * s_per_byte` on a link. Each algorithm says in `algorithms.py` how many such
messages its phases take; the table's cost model, the fit of the tuner and the simulator all add up those phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection over which a message of n bytes takes `latency_s + n * s_per_byte`."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Links:
    """The links of a cluster whose nodes are alike; the ranks of a node share its link to the others."""

    inside: Link
    """The link that groups inside a node use: shared memory on CPU."""
    inside_backend: Link
    """The link that the backend's own ring uses inside a node: sockets on gloo."""
    between: Link
    """The link between nodes."""
    reduce_s_per_byte: float
    """Time to add one byte of gradients to a sum."""
    num_nics: int = 1
    """Number of links from a node to the others; a ring, and ranks that send at the same time, spread over them."""


# These are assumptions, not measurements: shared memory, loopback and 1 Gbit/s Ethernet for gloo; PCIe and 100 Gbit/s
# RDMA for NCCL.
DEFAULT_LINKS = {
    "gloo": Links(Link(50e-6, 1 / 8e9), Link(50e-6, 1 / 1e9), Link(150e-6, 1 / 125e6), 1 / 8e9),
    "nccl": Links(Link(5e-6, 1 / 12e9), Link(5e-6, 1 / 12e9), Link(9e-6, 1 / 12.5e9), 1 / 200e9),
}


def default_links(backend: str) -> Links:
    """The stated links of a backend; an unknown backend has those of gloo."""
    return DEFAULT_LINKS.get(backend, DEFAULT_LINKS["gloo"])


@dataclass(frozen=True)
class PhaseCost:
    """The seconds of one phase of an all-reduce.

    Phases are named as the engine's stages, except that `scatter` stands for all that happens between groups.
    """

    stage: str
    latency_s: float
    transfer_s: float
    sums_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Latency, transfer and sums, one after the other."""
        return self.latency_s + self.transfer_s + self.sums_s


def total_s(phases: Sequence[PhaseCost]) -> float:
    """Seconds of phases that run one after the other.

    Terms of one kind are added first: algorithms that cost the same then cost exactly the same, whatever their number
    of phases, and a tie goes to the simplest.
    """
    return sum(p.latency_s for p in phases) + sum(p.transfer_s for p in phases) + sum(p.sums_s for p in phases)
