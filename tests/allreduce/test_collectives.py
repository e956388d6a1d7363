"""The backend's own collectives, which CUDA uses, run through the same routes on gloo's CPU tensors."""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from lightning_fourmin.allreduce.algorithms import STAGES, build_route, num_steps
from lightning_fourmin.allreduce.collectives import BackendCollectives
from lightning_fourmin.allreduce.predivide import Scales
from lightning_fourmin.allreduce.process_groups import ProcessGroups
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
    route = build_route(algorithm, topology, groups, backend, backend, scales)
    payload = Numbers((torch.arange(8.0) + case.rank).mul_(route.before))
    whole = payload.live
    for stage in STAGES:
        if stage in route.phases:
            route.phases[stage](payload).wait()
    factor = route.after if algorithm != "ring" else 0.5 * route.after
    return whole.mul_(factor).tolist()


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "torus"])
@pytest.mark.parametrize("nodes", [[2, 2], [1, 1], [4]])
def test_backend_collectives_give_the_mean(ranks: RankPool, algorithm: str, nodes: list[int]) -> None:
    mean = [i + (sum(nodes) - 1) / 2 for i in range(8)]
    assert ranks.run(backend_route, algorithm, nodes=nodes) == [mean] * sum(nodes)


def test_step_counts_are_the_papers() -> None:
    p1024 = {k: Topology.build([rank // 8 for rank in range(1024)], group_size=k) for k in (16, 32)}
    assert num_steps("ring", p1024[16]) == 2046
    assert num_steps("hierarchical", p1024[16]) == num_steps("hierarchical", p1024[32]) == 186
    assert num_steps("torus", p1024[16]) == 2 * 15 + 2 * 63
