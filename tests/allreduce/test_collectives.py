"""Algorithms as phases: the backend's own collectives on gloo's CPU tensors, and halves that run apart."""

import time
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from lightning_fourmin.allreduce.algorithms import ALGORITHMS, STAGES, Transport
from lightning_fourmin.allreduce.collectives import BackendCollectives, MessageCollectives, Scratch
from lightning_fourmin.allreduce.predivide import Scales
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.routes import Route
from lightning_fourmin.allreduce.topology import Topology
from tests.support.pool import RankPool
from tests.support.ranks import current_case


@dataclass
class Numbers:
    """A payload of its own, as the engine's pieces are."""

    live: Tensor
    tag: int = 0
    slot: None = None
    splits: list[list[Tensor]] = field(default_factory=list)


def backend_route(algorithm: str) -> list[float]:
    case = current_case()
    topology = Topology.build([node for node, size in enumerate(case.nodes) for _ in range(size)])
    backend = BackendCollectives()
    groups = ProcessGroups.shared(timedelta(seconds=60))
    # Powers of two, so that the result is exact: 1/2 before, 1/2 on the first sum, the rest after.
    scales = Scales(0.5, 0.5, 1.0, 4 / case.world)
    route = Route.build(ALGORITHMS[algorithm], Transport(topology, groups, backend, backend), scales)
    payload = Numbers((torch.arange(8.0) + case.rank).mul_(route.before))
    whole = payload.live
    for phase in route.phases.values():
        phase(payload).wait()
    factor = route.after if algorithm != "ring" else 0.5 * route.after
    return whole.mul_(factor).tolist()


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "torus"])
@pytest.mark.parametrize("nodes", [[2, 2], [1, 1], [4]])
def test_backend_collectives_give_the_mean(ranks: RankPool, algorithm: str, nodes: list[int]) -> None:
    mean = [i + (sum(nodes) - 1) / 2 for i in range(8)]
    assert ranks.run(backend_route, algorithm, nodes=nodes) == [mean] * sum(nodes)


def test_step_counts_are_the_papers() -> None:
    p1024 = {k: Topology.build([rank // 8 for rank in range(1024)], group_size=k) for k in (16, 32)}
    assert ALGORITHMS["ring"].num_steps(p1024[16]) == 2046
    assert ALGORITHMS["hierarchical"].num_steps(p1024[16]) == ALGORITHMS["hierarchical"].num_steps(p1024[32]) == 186
    assert ALGORITHMS["torus"].num_steps(p1024[16]) == 2 * 15 + 2 * 63


def halves_apart(algorithm: str, numel: int) -> tuple[list[float], float]:
    """The first half in FP32, then the sums rounded to FP16 go out in a second half with another payload."""
    case = current_case()
    topology = Topology.build([node for node, size in enumerate(case.nodes) for _ in range(size)])
    messages = MessageCollectives(Scratch())
    groups = ProcessGroups.shared(timedelta(seconds=60))
    transport = Transport(topology, groups, messages, messages)
    phases = ALGORITHMS[algorithm].phases(transport, Scales(1.0, 1.0, 1.0, 1.0))
    first = Numbers(torch.arange(float(numel)) + 0.1 * case.rank)
    for phase in phases.until_owner.values():
        phase(first).wait()
    second = Numbers(torch.full((numel,), -1.0, dtype=torch.float16))
    whole = second.live
    phases.enter_owner(second)
    assert algorithm == "hierarchical" or second.live.numel() == first.live.numel()
    if second.live.numel() == first.live.numel():
        second.live.copy_(first.live)
    # Between the halves there may be any time, and any use of what the owner has.
    time.sleep(0.01 * case.rank)
    for phase in phases.from_owner.values():
        phase(second).wait()
    return whole.tolist(), float(sum(range(case.world)))


@pytest.mark.parametrize("algorithm", ["hierarchical", "torus"])
@pytest.mark.parametrize("numel", [3, 16, 1001])
@pytest.mark.parametrize("nodes", [[2, 2], [1, 1], [3], [2, 2, 2]])
def test_halves_run_apart_and_in_different_dtypes(
    ranks: RankPool, algorithm: str, numel: int, nodes: list[int]
) -> None:
    world = sum(nodes)
    sums = torch.arange(float(numel)) * world + 0.1 * sum(range(world))
    for found, _ in ranks.run(halves_apart, algorithm, numel, nodes=nodes):
        torch.testing.assert_close(torch.tensor(found), sums.half().float(), rtol=2**-10, atol=0.0)


def test_a_ring_has_no_halves(ranks: RankPool) -> None:
    assert ranks.run(stages_of, "ring", nodes=[2, 1]) == [(("scatter",), ())] * 3
    assert ranks.run(stages_of, "hierarchical", nodes=[2, 1]) == [
        (("reduce", "scatter"), ("gather", "broadcast")),
        (("reduce",), ("broadcast",)),
        (("scatter",), ("gather",)),
    ]


def stages_of(algorithm: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages in which this rank meets others, by half."""
    case = current_case()
    topology = Topology.build([node for node, size in enumerate(case.nodes) for _ in range(size)])
    messages = MessageCollectives(Scratch())
    transport = Transport(topology, ProcessGroups.shared(timedelta(seconds=60)), messages, messages)
    phases = ALGORITHMS[algorithm].phases(transport, Scales(1.0, 1.0, 1.0, 1.0))
    halves = [tuple(stage for stage in STAGES if stage in half) for half in (phases.until_owner, phases.from_owner)]
    return halves[0], halves[1]


def enter_a_whole() -> str:
    messages = MessageCollectives(Scratch(), whole_bytes=1)
    members = ProcessGroups.shared(timedelta(seconds=60)).members("scatter", ((0, 1),))
    assert members is not None
    try:
        messages.enter_part(Numbers(torch.ones(4)), members)
    except ValueError as error:
        return str(error)
    return "entered"


def test_whole_pieces_have_no_owner(ranks: RankPool) -> None:
    assert (
        ranks.run(enter_a_whole) == ["a transport that exchanges whole pieces has no owners: give it whole_bytes=0"] * 2
    )
