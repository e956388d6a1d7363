"""Cuts from ready times: what goes together, the file they are kept in, and a fit that uses them."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Callback, Trainer
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.buckets import FusionPlan
from lightning_fourmin.allreduce.cost import Link
from lightning_fourmin.allreduce.cuts import Cuts, cuts_path, read_cuts, write_cuts
from lightning_fourmin.allreduce.merge import ReadyGradient, merge
from lightning_fourmin.allreduce.table_csv import cached_table_path
from lightning_fourmin.allreduce.topology import Topology
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer

TRANSFER = Link(latency_s=1.0, s_per_byte=0.1)


def gradients(*ready: tuple[int, float]) -> list[ReadyGradient]:
    return [ReadyGradient(num_bytes, ready_s) for num_bytes, ready_s in ready]


def sizes(buckets: list[list[ReadyGradient]]) -> list[list[int]]:
    return [[gradient.num_bytes for gradient in bucket] for bucket in buckets]


# Cuts, with a latency of 1 s and 10 bytes a second.


def took_s(num_bytes: int) -> float:
    return TRANSFER.latency_s + num_bytes * TRANSFER.s_per_byte


def test_what_comes_within_a_latency_goes_along() -> None:
    assert sizes(merge(gradients((10, 0.0), (20, 0.5)), TRANSFER)) == [[10, 20]]
    assert sizes(merge(gradients((10, 0.0), (20, 2.5)), TRANSFER)) == [[10], [20]]


def test_what_comes_while_the_wire_is_taken_waits_together() -> None:
    """The first takes 1 + 4 s: the next two are ready before it is done."""
    assert sizes(merge(gradients((40, 0.0), (1, 2.0), (2, 4.0), (3, 7.5)), TRANSFER)) == [[40], [1, 2], [3]]


def test_fewer_bytes_on_the_wire_free_it_earlier() -> None:
    late = gradients((40, 0.0), (1, 4.9), (30, 5.98))
    assert sizes(merge(late, TRANSFER)) == [[40], [1, 30]]
    assert sizes(merge(late, TRANSFER, wire_share=0.1)) == [[40], [1], [30]]


def test_no_latency_keeps_gradients_apart() -> None:
    assert sizes(merge(gradients((1, 0.0), (2, 1.0), (3, 2.0)), Link(0.0, 0.1))) == [[1], [2], [3]]
    assert merge([], TRANSFER) == []


def last_done_s(buckets: list[list[ReadyGradient]]) -> float:
    """When the last bucket is done, if one is under way at a time."""
    done_s = 0.0
    for bucket in buckets:
        done_s = max(done_s, bucket[-1].ready_s) + took_s(sum(gradient.num_bytes for gradient in bucket))
    return done_s


def earliest_end(ready: list[ReadyGradient]) -> float:
    """The earliest end over all ways to cut."""
    ends = []
    for choice in range(1 << (len(ready) - 1)):
        cut = [[ready[0]]]
        for i, gradient in enumerate(ready[1:]):
            if choice >> i & 1:
                cut.append([gradient])
            else:
                cut[-1].append(gradient)
        ends.append(last_done_s(cut))
    return min(ends)


def merged_by_the_rule(ready: list[ReadyGradient]) -> list[list[ReadyGradient]]:
    """MG-WFBP's rule, walked in ready order."""
    buckets: list[list[ReadyGradient]] = [[ready[0]]]
    free_s = 0.0
    for gradient in ready[1:]:
        start_s = max(free_s, buckets[-1][-1].ready_s)
        if gradient.ready_s <= start_s + TRANSFER.latency_s:
            buckets[-1].append(gradient)
        else:
            free_s = start_s + took_s(sum(merged.num_bytes for merged in buckets[-1]))
            buckets.append([gradient])
    return buckets


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 3)), min_size=1, max_size=9))
def test_no_other_cut_ends_earlier(steps: list[tuple[int, float]]) -> None:
    times = accumulate(after_s for _, after_s in steps)
    ready = [ReadyGradient(num_bytes, at_s) for (num_bytes, _), at_s in zip(steps, times, strict=True)]
    end_s = last_done_s(merge(ready, TRANSFER))
    assert end_s == pytest.approx(earliest_end(ready))
    assert end_s <= last_done_s(merged_by_the_rule(ready)) + 1e-9


# The plan and its file.


def parameters(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(net.named_parameters())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 8), nn.Linear(8, 1))


def test_plan_cuts_where_it_is_told() -> None:
    everything = parameters(net())
    bucket_bytes = [4 * (1 + 8), 4 * (8 + 512 + 64), 4 * 256]
    for rebuilt in (True, False):
        plan = FusionPlan.from_cuts(everything, bucket_bytes, rebuilt)
        assert [bucket.num_bytes for bucket in plan.buckets] == bucket_bytes
        assert [set(bucket.names) for bucket in plan.buckets] == [
            {"2.bias", "2.weight"},
            {"1.bias", "1.weight", "0.bias"},
            {"0.weight"},
        ]
    assert str(plan).startswith("3 buckets, fusion measured cuts")


@pytest.mark.parametrize("bucket_bytes", [[40, 10_000], [36, 100, 3324], [36]])
def test_cuts_of_another_module_are_refused(bucket_bytes: list[int]) -> None:
    with pytest.raises(ValueError, match="do not end where gradients of this module end: they were made for another"):
        FusionPlan.from_cuts(parameters(net()), bucket_bytes)


def test_file_is_found_by_shapes_and_read_back(tmp_path: Path) -> None:
    path = cuts_path(tmp_path / "table.csv", parameters(net()))
    wrapped = cuts_path(tmp_path / "table.csv", parameters(nn.ModuleDict({"net": net()})))
    assert path == wrapped
    assert path != cuts_path(tmp_path / "table.csv", parameters(net().half()))
    assert read_cuts(path) is None
    for cuts in (Cuts((36, 3360)), Cuts((36, 3360), "torus")):
        write_cuts(path, cuts, "by hand")
        assert read_cuts(path) == cuts
    assert path.parent == tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"bucket_bytes": []}',
        '{"bucket_bytes": 4}',
        '{"bucket_bytes": [3.5]}',
        '{"bucket_bytes": [4], "algorithm": "star"}',
        "\x00",
    ],
)
def test_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.abc.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table.abc.json does not say where to cut buckets .*: delete it, or run"):
        read_cuts(path)


class AlgorithmsUsed(Callback):
    """What the strategy chooses algorithms by."""

    summary = ""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, FourMinStrategy)
        assert trainer.strategy.table is not None
        self.summary = trainer.strategy.table.summary()


def fit_with_cuts(cuts: Cuts, **strategy_kwargs: Any) -> tuple[str, str]:
    """How buckets were cut, and which algorithms they went by."""
    module = Regression(net())
    strategy = FourMinStrategy(**strategy_kwargs)
    trainer = rank_trainer(strategy, max_steps=3)
    # Only rank 0 has the file: nodes may have discs of their own.
    path = cuts_path(cached_table_path(Topology.build([0, 0]), "gloo"), parameters(module))
    if dist.get_rank() == 0:
        write_cuts(path, cuts, "by hand")
    dist.barrier()
    chosen = AlgorithmsUsed()
    trainer.callbacks.append(chosen)  # type: ignore[attr-defined]
    try:
        trainer.fit(module, data(4))
    except ValueError as error:
        return str(error), ""
    finally:
        dist.barrier()
        path.unlink(missing_ok=True)
    assert strategy.fusion_plan is not None
    return str(strategy.fusion_plan).splitlines()[0], chosen.summary


def test_next_start_uses_the_cuts_on_all_ranks(ranks: RankPool) -> None:
    cuts = Cuts((36, 4 * 584, 4 * 256))
    ((how, by_table), same) = ranks.run(fit_with_cuts, cuts)
    assert how == "3 buckets, fusion measured cuts"
    assert same == (how, by_table)
    for name in ("ring", "torus"):
        assert ranks.run(fit_with_cuts, replace(cuts, algorithm=name)) == [(how, name)] * 2
    asked = ranks.run(fit_with_cuts, replace(cuts, algorithm="ring"), algorithm="torus")
    assert asked == [(how, "torus")] * 2
    given = ranks.run(fit_with_cuts, replace(cuts, algorithm="torus"), fusion_mb=1.0)
    assert given == [("1 buckets, fusion threshold 1 MiB", by_table)] * 2
    # Of groups that the table may have; of other nodes.
    assert ranks.run(fit_with_cuts, replace(cuts, topology_key="nodes1x2_groups2x1")) == [(how, by_table)] * 2
    for other, _ in ranks.run(fit_with_cuts, replace(cuts, topology_key="nodes2x1_groups2x1")):
        assert other.startswith("1 buckets, fusion threshold ")
    for error, _ in ranks.run(fit_with_cuts, Cuts((-1,))):
        assert "does not say where to cut buckets" in error
