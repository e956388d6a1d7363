"""What an all-reduce costs: the paper's cost models over links inside and between nodes."""

from dataclasses import dataclass

from lightning_fourmin.comm.topology import Topology


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes `latency_s + n * s_per_byte`."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Links:
    """Links of a cluster; the ranks of a node share its link to the others."""

    inside: Link
    """What groups inside a node use: shared memory on CPU."""
    inside_backend: Link
    """What the backend's own ring uses inside a node: sockets on gloo."""
    between: Link
    reduce_s_per_byte: float


# Stated, not measured: shared memory, loopback and 1 Gbit/s Ethernet for gloo, PCIe and 100 Gbit/s RDMA for NCCL.
DEFAULT_LINKS = {
    "gloo": Links(Link(50e-6, 1 / 8e9), Link(50e-6, 1 / 1e9), Link(150e-6, 1 / 125e6), 1 / 8e9),
    "nccl": Links(Link(5e-6, 1 / 12e9), Link(5e-6, 1 / 12e9), Link(9e-6, 1 / 12.5e9), 1 / 200e9),
}


def all_reduce_s(algorithm: str, num_bytes: int, topology: Topology, links: Links) -> float:
    """Seconds that one all-reduce of `num_bytes` takes by itself (Jia et al. 4.3, Thakur et al. for the ring)."""
    n, p, k, q = num_bytes, topology.world_size, topology.largest_group, len(topology.groups)
    inside, between, g = links.inside, links.between, links.reduce_s_per_byte
    if algorithm == "ring":
        link = between if topology.num_nodes > 1 else links.inside_backend
        return 2 * (p - 1) * link.latency_s + 2 * (p - 1) / p * n * link.s_per_byte + (p - 1) / p * n * g
    across_bytes_s = 2 * (q - 1) / q * n * between.s_per_byte
    if algorithm == "hierarchical":
        inside_s = 4 * (k - 1) * inside.latency_s + 4 * (k - 1) / k * n * inside.s_per_byte
        sums_s = ((k - 1) / k + (q - 1) / q) * n * g
        return inside_s + 2 * (q - 1) * between.latency_s + across_bytes_s + sums_s
    if algorithm == "torus":
        inside_s = 2 * (k - 1) * inside.latency_s + 2 * (k - 1) / k * n * inside.s_per_byte
        # k messages of n/k bytes leave a node at once and share its link: as many bytes, k times the messages.
        # The sums are shared too: a rank adds up 1/k of the data between groups.
        return inside_s + k * 2 * (q - 1) * between.latency_s + across_bytes_s + (p - 1) / p * n * g
    raise ValueError(f"no cost model for algorithm {algorithm!r}")
