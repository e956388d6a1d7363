"""Steps with each plan: which plans are tried, that each step does what it says, and that ranks agree."""

from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fourmin.allreduce.buckets import FusionPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.tune import step_trial as trial
from lightning_fourmin.tune.step_trial import StepTrial, ways_to_send
from tests.allreduce.test_engine import topology
from tests.support.pool import RankPool

CUTS = [4 * (1 + 8), 4 * (8 + 512 + 64 + 256)]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 8), nn.Linear(8, 1))


def plan() -> FusionPlan:
    return FusionPlan.from_cuts(list(net().named_parameters()), CUTS)


def table(*rows: Row) -> AllReduceTable:
    return AllReduceTable("nodes2x2_groups2x2", "gloo", "cost model", rows)


def test_no_way_is_tried_twice() -> None:
    small_torus = table(Row(256, {"ring": 2, "torus": 1}), Row(1024, {"ring": 1, "torus": 2}))
    ring, torus = (replace(plan(), algorithm=name) for name in ("ring", "torus"))
    assert ways_to_send(plan(), small_torus, 1.0) == [plan(), ring, torus]
    # With so little on the wire both buckets are small, as the torus takes them.
    assert ways_to_send(plan(), small_torus, 0.05) == [plan(), ring]


def steps_with(budget_s: float) -> tuple[list[int], list[Tensor], list[float]]:
    """How many times each plan has, the gradients of the last step with each, and what progress was told."""
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

    chooser = AllReduceTable.from_cost_model(where, "gloo")
    plans = [None, plan(), *(replace(plan(), algorithm=name) for name in ("ring", "hierarchical"))]
    groups = ProcessGroups.shared(timedelta(seconds=60))
    shares: list[float] = []
    times = StepTrial(model, batch, step, where, chooser, groups, None).measure(plans, budget_s, shares.append)
    assert all(ms > 0 for some in times for ms in some)
    return [len(some) for some in times], list(seen.values()), shares


def test_every_plan_sums_the_gradients_of_all_ranks(ranks: RankPool) -> None:
    answers = ranks.run(steps_with, 1e-6, nodes=[2, 1])
    reference = net()
    for parameter in reference.parameters():
        nn.init.constant_(parameter, 0.1)
    # The mean of the losses of ranks whose batches are 1, 2 and 3.
    reference(torch.full((2, 4), 2.0)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    for counts, gradients, shares in answers:
        assert counts == [2 * trial.NUM_TIMED] * 4
        assert len(gradients) == 8
        for found in gradients:
            torch.testing.assert_close(found, expected)
        assert shares[-1] == 1.0


def synced_buffers(with_mask: bool) -> bool:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    if with_mask:
        model.register_buffer("mask", torch.ones(3))
    where = Topology.build([0] * dist.get_world_size())
    chooser, groups = AllReduceTable.from_cost_model(where, "gloo"), ProcessGroups.shared(timedelta(seconds=60))
    synced = []

    def step(wrapped: nn.Module, batch: Tensor) -> None:
        wrapped(batch).sum().backward()
        synced.append(wrapped.will_sync_module_buffers())

    cuts = FusionPlan.build(list(model.named_parameters()), 1.0)
    StepTrial(model, torch.ones(2, 4), step, where, chooser, groups, None).measure([cuts], 1e-6)
    (answer,) = set(synced)
    return bool(answer)


def test_buffers_are_synced_as_the_strategy_would(ranks: RankPool) -> None:
    assert ranks.run(synced_buffers, False, world=2) == [False] * 2
    assert ranks.run(synced_buffers, True, world=2) == [True] * 2


def turns_in(budgets_s: tuple[float, ...]) -> int:
    where = Topology.build([0] * dist.get_world_size())
    model = net()

    def step(wrapped: nn.Module, batch: Tensor) -> None:
        wrapped(batch).sum().backward()

    chooser = AllReduceTable.from_cost_model(where, "gloo")
    groups = ProcessGroups.shared(timedelta(seconds=60))
    budget_s = budgets_s[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.tune.step_trial.time", SimpleNamespace(monotonic=count().__next__))
        (times,) = StepTrial(model, torch.ones(2, 4), step, where, chooser, groups, None).measure([plan()], budget_s)
    return len(times) // trial.NUM_TIMED


def test_ranks_take_as_many_turns_as_rank_0_decides(ranks: RankPool) -> None:
    """By a clock that counts turns: after four of them the next would be too much for 4.5."""
    assert ranks.run(turns_in, (4.5, 0.1)) == [4, 4]
    assert ranks.run(turns_in, (0.1, 4.5)) == [2, 2]


class Scripted(StepTrial):
    """Steps of known length, by the algorithm of the plan."""

    def _turn(self, plan: FusionPlan | None) -> list[float]:
        return [100.0 if plan is None else {"ring": 120.0, "torus": 99.0, "hierarchical": 95.0}[plan.algorithm or ""]]


def turns_of_each() -> list[int]:
    where = topology()
    chooser = AllReduceTable.from_cost_model(where, "gloo")
    groups = ProcessGroups.shared(timedelta(seconds=60))
    plans = [None, *(replace(plan(), algorithm=name) for name in ("ring", "torus", "hierarchical"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.tune.step_trial.time", SimpleNamespace(monotonic=count().__next__))
        times = Scripted(net(), torch.ones(2, 4), print, where, chooser, groups, None).measure(plans, 15.5)
    return [len(ms) for ms in times]


def test_only_those_in_reach_of_the_fastest_go_on(ranks: RankPool) -> None:
    """Two turns of four, then as many of three as fit into 15.5: after 11 the next is expected to end at 14.7."""
    assert ranks.run(turns_of_each) == [[4, 2, 4, 4]] * 2
