"""The plan: what is decided for every bucket, the same pieces for whoever asks, and how exact each mode really is."""

from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.algorithms import ALGORITHMS, PREDICTED, usable_algorithms
from lightning_fourmin.allreduce.cost import default_links
from lightning_fourmin.allreduce.engine import Engine, all_reduce_hook
from lightning_fourmin.allreduce.plan import BIT_EQUAL, SUMMATION_ORDER, CommOptions, CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable, Row, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.simulate.layer_profile import Gradient, Profile
from lightning_fourmin.simulate.step import CommCosts, simulate
from tests.allreduce.test_engine import topology
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer

TWO_NODES = Topology.build([0, 0, 1, 1])
MIB = 1024 * 1024


def parameters(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(net.named_parameters())


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 700), nn.Linear(700, 700), nn.Linear(700, 8))


def decide(where: Topology = TWO_NODES, table: AllReduceTable | None = None, **options: Any) -> CommPlan:
    return CommPlan.decide(CommOptions(**options), where, "gloo", table, parameters(chain()))


def test_rows_are_the_buckets_in_ready_order() -> None:
    plan = decide(fusion_mb=0.01, algorithm="hierarchical", wire_dtype="fp16")
    assert plan.fusion is not None
    assert [row.bucket for row in plan.rows] == list(plan.fusion.buckets)
    assert plan.rows[0].bucket.names[-1] == "2.weight"
    for row in plan.rows:
        assert row.sending.num_bytes == row.bucket.num_bytes // 2 == sum(row.sending.piece_bytes)
        assert row.expected_ms == plan.table.expected_ms(row.sending.num_bytes)["hierarchical"]
        assert (row.form, row.update, row.exactness) == ("dense", "replicated", "rounded to fp16")


def test_threshold_is_the_users_then_the_tables_then_the_default() -> None:
    by_default, where = decide(), TWO_NODES
    assert by_default.fusion is not None
    assert by_default.fusion.threshold_bytes == int(default_fusion_mb(where, "gloo") * MIB)
    tuned = AllReduceTable(
        "nodes2x2_groups2x2", "gloo", "measured", (Row(256, {"ring": 1.0, "torus": 2.0}),), fusion_mb=0.5
    )
    found = decide(table=tuned)
    given_by_user = decide(table=tuned, fusion_mb=0.25)
    assert found.fusion is not None
    assert given_by_user.fusion is not None
    assert (found.fusion.threshold_bytes, given_by_user.fusion.threshold_bytes) == (MIB // 2, MIB // 4)


def test_groups_are_those_of_the_table() -> None:
    tuned = AllReduceTable("nodes2x2_groups4x1", "gloo", "measured", (Row(256, {"ring": 1.0}),), group_size=1)
    assert decide(table=tuned).topology.groups == ((0,), (1,), (2,), (3,))


def test_algorithm_is_the_users_then_the_nets_then_the_sizes() -> None:
    rows = (
        Row(256, {"ring": 9.0, "torus": 1.0, "hierarchical": 2.0}),
        Row(MIB, {"ring": 1.0, "torus": 9.0, "hierarchical": 2.0}),
    )
    by_size = AllReduceTable("nodes2x2_groups2x2", "gloo", "measured", rows)
    chosen = [row.sending.algorithm.name for row in decide(table=by_size, fusion_mb=0.01).rows]
    assert chosen == ["torus", "torus", "ring", "torus", "torus"]
    for_net = replace(by_size, algorithm="hierarchical")
    assert {row.sending.algorithm.name for row in decide(table=for_net).rows} == {"hierarchical"}
    assert {row.sending.algorithm.name for row in decide(table=for_net, algorithm="ring").rows} == {"ring"}


def test_without_parameters_ddp_cuts() -> None:
    plan = CommPlan.decide(CommOptions(), TWO_NODES, "gloo")
    assert plan.fusion is None
    assert plan.rows == ()
    assert "as DDP cuts them" in plan.summary()
    assert plan.explain() == "DDP cuts the buckets by itself"


@given(st.integers(0, 5_000_000), st.integers(1, 1 << 22), st.sampled_from([None, torch.float16]))
def test_pieces_are_cut_as_torch_cuts(numel: int, chunk_bytes: int, wire_dtype: torch.dtype | None) -> None:
    table = AllReduceTable("nodes2x2_groups2x2", "gloo", "made", (Row(1, {"torus": 1.0}),), chunk_bytes=chunk_bytes)
    sending = CommPlan(TWO_NODES, table, wire_dtype).send(numel, torch.float32)
    assert sum(sending.numels) == numel
    assert numel == 0 or min(sending.numels) >= 1
    if len(sending.numels) < 10_000:
        cut = torch.empty(numel, device="meta").tensor_split(len(sending.numels))
        assert sending.numels == tuple(part.numel() for part in cut)
    assert max(sending.numels) - min(sending.numels) <= 1
    assert max(sending.piece_bytes) < chunk_bytes + sending.wire_dtype.itemsize


def test_explanation_has_a_line_a_bucket() -> None:
    head, *lines = decide(fusion_mb=0.01, algorithm="torus").explain().splitlines()
    assert head.split("  ")[0] == ""
    assert [line.split()[:2] for line in lines] == [
        ["0", "2.bias"],
        ["1", "1.bias"],
        ["2", "1.weight"],
        ["3", "0.bias"],
        ["4", "0.weight"],
    ]
    assert all("torus" in line and "dense" in line and line.endswith(SUMMATION_ORDER) for line in lines)
    assert "1.869 MiB    dense  torus in 2 pieces" in lines[2]


def test_a_long_explanation_keeps_the_first_and_the_last_buckets() -> None:
    plan = decide(fusion_mb=0.01)
    assert len(plan.rows) == 5
    whole = plan.explain()
    assert plan.explain(most_rows=5) == plan.explain(most_rows=9) == whole
    for most_rows, first, left_out, last in ((4, "01", "1 bucket", "34"), (3, "0", "2 buckets", "34")):
        _, *lines = plan.explain(most_rows).splitlines()
        assert lines.pop(len(first)) == f"... {left_out} left out"
        assert [line.split()[0] for line in lines] == [*first, *last]


def test_switch_to_what_the_table_does_not_have() -> None:
    """The paper's hybrid takes hierarchical and ring, whatever was measured."""
    torus = AllReduceTable("nodes2x2_groups2x2", "gloo", "measured", (Row(256, {"torus": 1.0}),))
    plan = decide(table=torus, fusion_mb=0.01, switch_mb=0.1)
    assert [(row.sending.algorithm.name, row.expected_ms) for row in plan.rows][:3] == [
        ("hierarchical", None),
        ("hierarchical", None),
        ("ring", None),
    ]
    assert len(plan.explain().splitlines()) == 1 + len(plan.rows)


# The same pieces everywhere.


def pieces_sent(options: dict[str, Any]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Algorithm and bytes of each piece of a step: as the engine takes them through its first stage, and simulated."""
    sent: list[tuple[str, int]] = []
    advance = Engine.advance

    def note(self: Engine, piece: Any, stage: str, is_first: bool) -> None:
        if is_first:
            wire_dtype = self.plan.wire_dtype or piece.gradients.dtype
            sent.append((piece.bucket.route.algorithm.name, piece.gradients.numel() * wire_dtype.itemsize))
        advance(self, piece, stage, is_first)

    strategy = FourMinStrategy(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "advance", note)
        trainer = rank_trainer(strategy, max_steps=3)
        trainer.fit(Regression(chain()), data(8))
    plan = strategy.plan
    assert plan is not None
    gradients = tuple(
        Gradient(name, row.bucket.num_bytes, float(i)) for i, row in enumerate(plan.rows) for name in row.bucket.names
    )
    step = simulate(Profile(gradients, 1.0, 10.0, 1.0, 1, "made"), plan, CommCosts(default_links("gloo")))
    simulated = [(s.details["algorithm"], s.details["bytes"]) for s in step.spans if s.lane == "scatter"]
    # The last step: in the first one DDP cuts its buckets in another order.
    return sent[-len(simulated) :], simulated  # type: ignore[return-value]


@pytest.mark.parametrize(
    "options",
    [
        {"fusion_mb": 0.01},
        {"fusion_mb": 0.01, "algorithm": "torus", "wire_dtype": "fp16"},
        {"fusion_mb": 50.0, "algorithm": "hierarchical"},
        {"fusion_mb": 0.5, "switch_mb": 0.05},
    ],
    ids=str,
)
def test_pieces_simulated_are_the_pieces_sent(ranks: RankPool, options: dict[str, Any]) -> None:
    for sent, simulated in ranks.run(pieces_sent, options, nodes=[2, 2]):
        assert len(simulated) >= 2
        assert sent == simulated


# Exactness.


def differences_from_ddp(algorithm: str, wire_dtype: torch.dtype | None) -> tuple[str, float]:
    """What the plan says, and the largest difference of a gradient from plain DDP's with the same buckets."""
    where, device = topology(), torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    net, batch = chain(), torch.randn(16, 8)
    options = CommOptions(algorithm, fusion_mb=0.01, wire_dtype={torch.float16: "fp16"}.get(wire_dtype))  # type: ignore[arg-type]
    plan = CommPlan.decide(options, where, "gloo", parameters=parameters(net))
    assert plan.fusion is not None
    found = []
    for ours in (False, True):
        wrapped = DistributedDataParallel(net, bucket_cap_mb_list=list(plan.fusion.caps_mb))  # type: ignore[arg-type]
        engine = Engine(plan, ProcessGroups.shared(timedelta(seconds=60)), device, shared_bytes=4 * MIB)
        if ours:
            wrapped.register_comm_hook(engine, all_reduce_hook)
        net.zero_grad()
        wrapped(batch).square().sum().backward()
        engine.raise_error()
        engine.close()
        found.append(torch.cat([p.grad.flatten().clone() for p in net.parameters() if p.grad is not None]))
    ddp, mine = found
    return plan.exactness, float((mine - ddp).abs().max() / ddp.abs().max())


@pytest.mark.parametrize("nodes", [[1, 1], [2], [2, 2], [3]])
def test_the_plan_says_how_exact_it_is(ranks: RankPool, nodes: list[int]) -> None:
    for algorithm in usable_algorithms(Topology.build([node for node, size in enumerate(nodes) for _ in range(size)])):
        for says, difference in ranks.run(differences_from_ddp, algorithm, None, nodes=nodes):
            assert says == (BIT_EQUAL if sum(nodes) == 2 else SUMMATION_ORDER)
            assert difference == 0.0 if says == BIT_EQUAL else difference < 1e-6
        for says, difference in ranks.run(differences_from_ddp, algorithm, torch.float16, nodes=nodes):
            assert says == "rounded to fp16"
            assert 0.0 < difference < 2e-3


# Algorithms as objects.


def test_algorithms_by_name() -> None:
    assert list(ALGORITHMS) == ["ring", "hierarchical", "torus"]
    assert list(PREDICTED) == ["halving_doubling", "parameter_server"]
    for name, algorithm in (ALGORITHMS | PREDICTED).items():
        assert algorithm.name == name
        assert algorithm.costs(1000, TWO_NODES, default_links("gloo"))
        assert algorithm.num_steps(TWO_NODES) > 0
        assert 1 in algorithm.peers("scatter", TWO_NODES, 1) or name == "hierarchical"
    with pytest.raises(TypeError, match="parameter_server is predicted only"):
        PREDICTED["parameter_server"].phases(None, None)  # type: ignore[arg-type]
    assert list(accumulate(ALGORITHMS[name].in_pieces for name in ALGORITHMS)) == [0, 1, 2]
