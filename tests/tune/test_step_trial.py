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
from lightning_fourmin.tune.verdict import LOOKS
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
    tried = StepTrial(model, batch, step, groups)
    times = tried.search(plans, budget_s, shares.append)
    assert all(ms > 0 for some in times for ms in some)
    verdict = tried.compare(plans[0], budget_s, shares.append)
    assert min(verdict.compute_ms, verdict.ddp_ms, verdict.ours_ms) > 0
    return [*map(len, times), verdict.num_rounds], list(seen.values()), shares


def test_every_plan_sums_the_gradients_of_all_ranks(ranks: RankPool) -> None:
    answers = ranks.run(steps_with, 1e-6, nodes=[2, 1])
    for rank, (counts, gradients, shares) in enumerate(answers):
        assert counts == [*[2 * trial.NUM_TIMED] * 3, 1]
        *searched, alone, ddp, planned = gradients
        assert len(searched) == 6
        summed = [*searched, ddp, planned]
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
    StepTrial(model, torch.ones(2, 4), step, groups).compare(planned, 1e-6, lambda share: None)
    # The plan is the last of the first round, which is the only one.
    (answer,) = set(synced[2 * (trial.NUM_WARMUP + trial.NUM_TIMED) :])
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


def scripted_trial(budget_s: float, compares: str | None) -> list[int] | int:
    """How many turns each plan got in a search, or the number of rounds in which one of them was compared."""
    where = topology()
    groups = ProcessGroups.shared(timedelta(seconds=60))
    plans = {name: plan(where, name) for name in ("ring", "torus", "hierarchical")}
    scripted = Scripted(net(), torch.ones(2, 4), print, groups)
    shares: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.tune.step_trial.time", SimpleNamespace(monotonic=count().__next__))
        if compares is not None:
            return scripted.compare(plans[compares], budget_s, shares.append).num_rounds
        return [len(ms) for ms in scripted.search(list(plans.values()), budget_s, shares.append)]


def turns_of_each(budgets_s: tuple[float, ...], compares: str | None = None) -> list[int] | int:
    return scripted_trial(budgets_s[dist.get_rank()], compares)


def test_only_those_in_reach_of_the_fastest_go_on(ranks: RankPool) -> None:
    """By a clock that counts variants: two turns of three, then as many of two as fit.

    After 6 the third turn is expected to end at 9, after 8 the fourth at 10.7: too much for 10.
    """
    assert ranks.run(turns_of_each, (10.0, 10.0)) == [[2, 3, 3]] * 2


def test_ranks_take_as_many_turns_as_rank_0_decides(ranks: RankPool) -> None:
    assert ranks.run(turns_of_each, (10.0, 0.1)) == [[2, 3, 3]] * 2
    assert ranks.run(turns_of_each, (0.1, 10.0)) == [[2] * 3] * 2


def test_a_comparison_ends_when_it_is_clear_or_time_is_up(ranks: RankPool) -> None:
    """By a clock that counts rounds. The speedup is 1.01 by the torus and 0.83 by the ring, the same in each round."""
    assert ranks.run(turns_of_each, (100.0, 100.0), "torus") == [LOOKS[0]] * 2
    assert ranks.run(turns_of_each, (100.0, 0.1), "ring") == [LOOKS[0]] * 2
    assert ranks.run(turns_of_each, (5.0, 100.0), "ring") == [5] * 2
