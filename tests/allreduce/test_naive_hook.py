"""The engine against the naive hook: the same means, bit-equal as a ring, up to the order of summation else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fourmin.allreduce.algorithms import usable_algorithms
from lightning_fourmin.allreduce.engine import Engine, all_reduce_hook
from lightning_fourmin.allreduce.naive_hook import naive_all_reduce_hook
from lightning_fourmin.allreduce.plan import CommOptions, CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from tests.allreduce.test_engine import topology
from tests.support.pool import RankPool
from tests.support.ranks import current_case

NUM_STEPS = 3
Hook = tuple[Any, Callable[..., Any]]


@contextmanager
def engine_hook(algorithm: str) -> Iterator[Hook]:
    plan = CommPlan.decide(CommOptions(algorithm), topology(), "gloo")
    engine = Engine(plan, ProcessGroups.shared(timedelta(seconds=60)), torch.device("cpu"), shared_bytes=8 << 20)
    yield engine, all_reduce_hook
    engine.raise_error()
    engine.close()


def gradients(hook: Hook) -> list[Tensor]:
    """All gradients after each step of DDP with a hook; the net is large enough for several buckets."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 4))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1)
    wrapped.register_comm_hook(*hook)
    torch.manual_seed(1 + current_case().rank)
    found = []
    for _ in range(NUM_STEPS):
        net.zero_grad()
        wrapped(torch.randn(8, 16)).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    return found


def differences() -> dict[str, float]:
    """Of each algorithm from the naive hook, relative to the largest gradient."""
    naive = gradients((None, naive_all_reduce_hook))
    found = {}
    for algorithm in usable_algorithms(topology()):
        with engine_hook(algorithm) as hook:
            ours = gradients(hook)
        found[algorithm] = max(
            float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in zip(ours, naive, strict=True)
        )
    return found


@pytest.mark.parametrize("nodes", [[1, 1], [3], [2, 2], [2, 1]])
def test_engine_equals_the_naive_hook(ranks: RankPool, nodes: list[int]) -> None:
    for found in ranks.run(differences, nodes=nodes):
        assert found.pop("ring") == 0.0
        assert found
        assert all(difference < 1e-6 for difference in found.values())
