"""Steps with each plan: which plans are tried, that each step does what it says, and that ranks agree."""

from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fourmin.allreduce.plan import CommOptions, CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.tune import step_trial as trial
from lightning_fourmin.tune.net import candidates
from lightning_fourmin.tune.step_trial import StepTrial
from tests.allreduce.test_engine import topology
from tests.support.pool import RankPool

FUSION_MB = 0.001
TWO_NODES = Topology.build([0, 0, 1, 1])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 8), nn.Linear(8, 1))


def plan(where: Topology, algorithm: str = "hybrid") -> CommPlan:
    options = CommOptions(algorithm, fusion_mb=FUSION_MB)
    return CommPlan.decide(options, where, "gloo", parameters=list(net().named_parameters()))


def table(*rows: Row) -> AllReduceTable:
    return AllReduceTable(TWO_NODES.key, "gloo", "cost model", rows)


def test_no_plan_is_tried_twice() -> None:
    by_size = table(Row(256, {"ring": 2, "torus": 1}), Row(1024, {"ring": 1, "torus": 2}))
    parameters = list(net().named_parameters())
    tried = candidates(CommOptions(), TWO_NODES, by_size, parameters)
    # One bucket at any of the thresholds, which the table sends as a ring.
    assert [(one.options.fusion_mb, one.plan.table.algorithms) for one in tried] == [
        (2.0, ("ring", "torus")),
        (2.0, ("torus",)),
    ]
    large = list(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).named_parameters())
    tried = candidates(CommOptions(), TWO_NODES, by_size, large)
    assert [one.options.fusion_mb for one in tried] == [2.0, 0.5, 8.0, 2.0]
    assert [one.options.algorithm for one in tried] == ["hybrid", "hybrid", "hybrid", "torus"]


def test_what_is_found_is_what_later_runs_do() -> None:
    by_size = table(Row(256, {"ring": 2, "torus": 1}), Row(1024, {"ring": 1, "torus": 2}))
    parameters = list(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).named_parameters())
    for one in candidates(CommOptions(), TWO_NODES, by_size, parameters):
        found = one.found_in(by_size)
        again = CommPlan.decide(CommOptions(), TWO_NODES, "gloo", found, parameters)
        assert [row.sending for row in again.rows] == [row.sending for row in one.plan.rows]
        assert again.fusion == one.plan.fusion


def steps_with(budget_s: float) -> tuple[list[int], list[Tensor], list[float]]:
    """How often each variant was timed, the gradients of its last step in each turn, and the shares of progress."""
    where = topology()
    model, batch = net(), torch.full((2, 4), 1.0 + dist.get_rank())
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    seen: dict[int, Tensor] = {}
    turns: list[nn.Module] = []

    def step(wrapped: nn.Module, batch: Tensor) -> None:
        model.zero_grad()
        wrapped(batch).sum().backward()
        if wrapped not in turns:
            turns.append(wrapped)
        seen[len(turns)] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plans = [plan(where), plan(where, "ring"), plan(where, "hierarchical")]
    groups = ProcessGroups.shared(timedelta(seconds=60))
    shares: list[float] = []
    found = StepTrial(model, batch, step, groups).measure(plans, budget_s, shares.append)
    times = [found.compute_ms, found.ddp_ms, *found.planned_ms]
    assert all(ms > 0 for some in times for ms in some)
    return [len(some) for some in times], list(seen.values()), shares


def test_every_plan_sums_the_gradients_of_all_ranks(ranks: RankPool) -> None:
    answers = ranks.run(steps_with, 1e-6, nodes=[2, 1])
    for rank, (counts, gradients, shares) in enumerate(answers):
        assert counts == [2 * trial.NUM_TIMED] * 5
        assert len(gradients) == 10
        alone, *summed = gradients[:-1]
        assert torch.equal(gradients[-1], alone)
        # Without communication a rank has the gradients of its own batch, which is 1, 2 or 3; else those of the mean.
        torch.testing.assert_close(alone, reference(1.0 + rank))
        for found in summed:
            torch.testing.assert_close(found, reference(2.0))
        assert shares[-1] == 1.0


def reference(value: float) -> Tensor:
    """The gradients of one process with a batch of this value."""
    model = net()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    model(torch.full((2, 4), value)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def synced_buffers(with_mask: bool) -> bool:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    if with_mask:
        model.register_buffer("mask", torch.ones(3))
    where = Topology.build([0] * dist.get_world_size())
    synced = []

    def step(wrapped: Any, batch: Tensor) -> None:
        wrapped(batch).sum().backward()
        synced.append(wrapped.will_sync_module_buffers())

    groups = ProcessGroups.shared(timedelta(seconds=60))
    planned = CommPlan.decide(CommOptions(fusion_mb=1.0), where, "gloo", parameters=list(model.named_parameters()))
    StepTrial(model, torch.ones(2, 4), step, groups).measure([planned], 1e-6)
    # The plan is the last of the first turn and the first of the second.
    num_steps = trial.NUM_WARMUP + trial.NUM_TIMED
    (answer,) = set(synced[2 * num_steps : 4 * num_steps])
    return bool(answer)


def test_buffers_are_synced_as_the_strategy_would(ranks: RankPool) -> None:
    assert ranks.run(synced_buffers, False, world=2) == [False] * 2
    assert ranks.run(synced_buffers, True, world=2) == [True] * 2


class Scripted(StepTrial):
    """Steps of known length for each variant."""

    def _turn(self, variant: Any) -> list[float]:
        if isinstance(variant, partial):
            (name,) = variant.args[0].table.algorithms
            return [{"ring": 120.0, "torus": 99.0, "hierarchical": 95.0}[name]]
        return [100.0 if variant == self._ddp else 50.0]


def turns_of_each(budgets_s: tuple[float, ...]) -> list[int]:
    where = topology()
    groups = ProcessGroups.shared(timedelta(seconds=60))
    plans = [plan(where, name) for name in ("ring", "torus", "hierarchical")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.tune.step_trial.time", SimpleNamespace(monotonic=count().__next__))
        found = Scripted(net(), torch.ones(2, 4), print, groups).measure(plans, budgets_s[dist.get_rank()])
    return [len(ms) for ms in (found.compute_ms, found.ddp_ms, *found.planned_ms)]


def test_only_those_in_reach_of_the_fastest_go_on(ranks: RankPool) -> None:
    """By a clock that counts variants: two turns of five, then as many of four as fit.

    After 10 the third turn is expected to end at 15, after 14 the fourth at 18.7: too much for 18.
    """
    assert ranks.run(turns_of_each, (18.0, 18.0)) == [[3, 3, 2, 3, 3]] * 2


def test_ranks_take_as_many_turns_as_rank_0_decides(ranks: RankPool) -> None:
    assert ranks.run(turns_of_each, (18.0, 0.1)) == [[3, 3, 2, 3, 3]] * 2
    assert ranks.run(turns_of_each, (0.1, 18.0)) == [[2] * 5] * 2
