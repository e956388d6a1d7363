"""What an all-reduce costs: the paper's cost models over links inside and between nodes."""

from dataclasses import dataclass

from lightning_fourmin.allreduce.topology import Topology


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
    num_nics: int = 1
    """Links a node has to the others; a ring and ranks that send at the same time spread over them."""


# Stated, not measured: shared memory, loopback and 1 Gbit/s Ethernet for gloo, PCIe and 100 Gbit/s RDMA for NCCL.
DEFAULT_LINKS = {
    "gloo": Links(Link(50e-6, 1 / 8e9), Link(50e-6, 1 / 1e9), Link(150e-6, 1 / 125e6), 1 / 8e9),
    "nccl": Links(Link(5e-6, 1 / 12e9), Link(5e-6, 1 / 12e9), Link(9e-6, 1 / 12.5e9), 1 / 200e9),
}


@dataclass(frozen=True)
class PhaseCost:
    """A phase of an all-reduce, named as its stage in the engine; `scatter` is all that happens between groups."""

    stage: str
    latency_s: float
    transfer_s: float
    sums_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.latency_s + self.transfer_s + self.sums_s


def all_reduce_s(algorithm: str, num_bytes: int, topology: Topology, links: Links) -> float:
    """Seconds that one all-reduce of `num_bytes` takes by itself."""
    phases = phase_costs(algorithm, num_bytes, topology, links)
    # In this order algorithms that cost the same cost exactly the same, and a tie goes to the simplest.
    return sum(p.latency_s for p in phases) + sum(p.transfer_s for p in phases) + sum(p.sums_s for p in phases)


def phase_costs(algorithm: str, num_bytes: int, topology: Topology, links: Links) -> tuple[PhaseCost, ...]:
    """Phases one after the other (Jia et al. 4.3, Thakur et al. for ring and halving-doubling)."""
    n, p, k, q = num_bytes, topology.world_size, topology.largest_group, len(topology.groups)
    g, num_nodes = links.reduce_s_per_byte, topology.num_nodes
    wire, num_nics = (links.between, links.num_nics) if num_nodes > 1 else (links.inside_backend, 1)
    if algorithm in ("ring", "halving_doubling", "parameter_server"):
        steps, copies, sums = _flat(algorithm, p)
        return (PhaseCost("scatter", steps * wire.latency_s, copies * n * wire.s_per_byte / num_nics, sums * n * g),)
    if algorithm == "hierarchical":
        rounds, senders_a_node, share = 2 * (k - 1), q / num_nodes, 1.0
    elif algorithm == "torus":
        rounds, senders_a_node, share = k - 1, p / num_nodes, 1 / k
    else:
        raise ValueError(f"no cost model for algorithm {algorithm!r}")
    # A group that reaches over several nodes is as slow as the link between them.
    inside = links.between if topology.groups_span_nodes else links.inside
    one_way = rounds * inside.latency_s, rounds / k * n * inside.s_per_byte
    # Ranks of a node that send at once share its links: their messages queue.
    queue = max(1.0, senders_a_node / num_nics) if num_nodes > 1 else 1.0
    across_s = 2 * (q - 1) / q * n * share * queue * wire.s_per_byte
    return (
        PhaseCost("reduce", *one_way, (k - 1) / k * n * g),
        PhaseCost("scatter", queue * 2 * (q - 1) * wire.latency_s, across_s, (q - 1) / q * n * share * g),
        PhaseCost("broadcast", *one_way),
    )


def _flat(algorithm: str, p: int) -> tuple[float, float, float]:
    """Steps, and how often each byte is sent and summed, of an algorithm that knows no groups."""
    if algorithm == "ring":
        return 2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p
    if algorithm == "parameter_server":  # one server: all gradients go in, all sums come out
        return 2, 2 * (p - 1), p - 1
    doublings = p.bit_length() - 1
    size = 1 << doublings
    # Ranks beyond a power of two hand their gradients to another first, and get the sums last.
    extra = int(p > size)
    return 2 * doublings + 2 * extra, 2 * (size - 1) / size + 2 * extra, (size - 1) / size + extra
