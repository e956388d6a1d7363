"""Cuts from ready times: what goes together, the file they are kept in, and a fit that uses them."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.comm.advice import StepTimes, ddp_buckets, sentence_for, sentence_without_model
from lightning_fourmin.comm.cost import Link
from lightning_fourmin.comm.fusion import FusionPlan
from lightning_fourmin.comm.merge import ReadyGradient, cuts_path, last_done_s, merge, read_cuts, write_cuts
from lightning_fourmin.comm.table import AllReduceTable, Row, cached_table_path
from pool import RankPool
from training import Regression, data, rank_trainer

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


def test_last_bucket_is_done_after_the_ones_before() -> None:
    cut = [gradients((10, 0.0)), gradients((10, 0.5)), gradients((10, 9.0))]
    assert last_done_s(cut, lambda n: 0.1 * n) == 10.0
    assert last_done_s(cut[:2], lambda n: 0.1 * n) == 2.0


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
        ends.append(last_done_s(cut, took_s))
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


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 3)), min_size=1, max_size=9))
def test_no_other_cut_ends_earlier(steps: list[tuple[int, float]]) -> None:
    times = accumulate(after_s for _, after_s in steps)
    ready = [ReadyGradient(num_bytes, at_s) for (num_bytes, _), at_s in zip(steps, times, strict=True)]
    end_s = last_done_s(merge(ready, TRANSFER), took_s)
    assert end_s == pytest.approx(earliest_end(ready))
    assert end_s <= last_done_s(merged_by_the_rule(ready), took_s) + 1e-9


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
    write_cuts(path, [36, 3360], "by hand")
    assert read_cuts(path) == (36, 3360)
    assert path.parent == tmp_path


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bucket_bytes": []}', '{"bucket_bytes": [3.5]}', "\x00"])
def test_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.abc.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table.abc.json does not say where to cut buckets .*: delete it, or run"):
        read_cuts(path)


def fit_with_cuts(cuts: list[int], **strategy_kwargs: Any) -> tuple[str, int]:
    """How buckets were cut, and how many there are."""
    module = Regression(net())
    strategy = FourMinStrategy(**strategy_kwargs)
    trainer = rank_trainer(strategy, max_steps=3)
    # Only rank 0 has the file: nodes may have discs of their own.
    path = cuts_path(cached_table_path(strategy.topology, "gloo"), parameters(module))
    if dist.get_rank() == 0:
        write_cuts(path, cuts, "by hand")
    dist.barrier()
    try:
        trainer.fit(module, data(4))
    except ValueError as error:
        return str(error), 0
    finally:
        dist.barrier()
        path.unlink(missing_ok=True)
    assert strategy.fusion_plan is not None
    return str(strategy.fusion_plan).splitlines()[0], len(strategy.fusion_plan.buckets)


def test_next_start_uses_the_cuts_on_all_ranks(ranks: RankPool) -> None:
    cuts = [36, 4 * 584, 4 * 256]
    assert ranks.run(fit_with_cuts, cuts) == [("3 buckets, fusion measured cuts", 3)] * 2
    given = ranks.run(fit_with_cuts, cuts, fusion_mb=1.0)
    assert given == [("1 buckets, fusion threshold 1 MiB", 1)] * 2
    for error, _ in ranks.run(fit_with_cuts, [-1]):
        assert "does not say where to cut buckets" in error


# Will it help?


def table(**ms_a_kib: float) -> AllReduceTable:
    rows = tuple(Row(n, {name: ms * n / 1024 for name, ms in ms_a_kib.items()}) for n in (1024, 1 << 20))
    return AllReduceTable("nodes2x2_groups2x2", "gloo", "measured", rows)


def test_ddp_closes_buckets_when_they_are_full() -> None:
    mib = 1 << 20
    ready = gradients((mib // 2, 0), (mib, 1), (20 * mib, 2), (20 * mib, 3), (mib, 4))
    assert sizes(ddp_buckets(ready)) == [[mib // 2, mib], [20 * mib, 20 * mib], [mib]]


def test_sentence_says_yes_where_less_is_exposed() -> None:
    ready = gradients((1 << 20, 0.1), (1 << 20, 0.2))
    step = StepTimes(ready, backward_s=0.2, rest_s=0.1)
    # A MiB takes 102 ms as a ring and 51 ms as hierarchical.
    sentence = sentence_for(step, table(ring=0.1, hierarchical=0.05), [[ready[0]], [ready[1]]], 1.0)
    assert sentence == (
        "Will it help you? Yes: 405 ms a step with ddp, 351 ms with fourmin expected, 1.15x; of 105 ms communication "
        "that backward does not hide 51 ms are left (2 buckets, hierarchical)."
    )


def test_sentence_says_no_where_backward_hides_all() -> None:
    ready = gradients((1024, 0.1), (1024, 9.0))
    sentence = sentence_for(StepTimes(ready, 9.0, 1.0), table(ring=0.1, torus=0.05), [ready], 1.0)
    assert sentence.startswith("Will it help you? Not in speed: 10000 ms a step with ddp, 10000 ms with fourmin")
    assert "0% of a step is communication that backward does not hide, and there is little to gain" in sentence


def test_sentence_says_no_where_nothing_is_faster() -> None:
    ready = gradients((1 << 20, 0.1))
    sentence = sentence_for(StepTimes(ready, 0.1, 0.1), table(ring=0.1, torus=0.2), [ready], 1.0)
    assert "Not in speed" in sentence
    assert "what is there takes as long here" in sentence


def test_sentence_without_a_model() -> None:
    assert "takes 102.4 ms as a ring and 51.2 ms as torus, 2.00x;" in sentence_without_model(
        table(ring=0.1, torus=0.05)
    )
    assert "takes 102.4 ms as a ring, and nothing else is faster;" in sentence_without_model(table(ring=0.1, torus=0.2))
