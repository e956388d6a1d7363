"""The measured table: the same on all ranks, kept for later runs, with what it was measured on, and its picture."""

import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce import measure_table as tuner
from lightning_fourmin.allreduce.measure_table import measure_table
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import (
    AllReduceTable,
    Row,
    cached_table_path,
    read_table,
    sizes_up_to,
    write_table,
)
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.tune.plot import draw
from tests.allreduce.test_engine import topology
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer


def info_lines_of_fit(strategy: FourMinStrategy) -> list[str]:
    """Fits two steps; gives the info lines of the strategy."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        trainer = rank_trainer(strategy, max_steps=2)
        trainer.fit(Regression(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))), data(4))
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if line.startswith("fourmin")]


def measured(largest_bytes: int, **kwargs: Any) -> tuple[AllReduceTable, list[float]]:
    """The table, and the shares of the budget that progress was told."""
    shares: list[float] = []
    groups = ProcessGroups.shared(timedelta(seconds=60))
    where = topology()
    table = measure_table(where, groups, torch.device("cpu"), largest_bytes, progress=shares.append, **kwargs)
    return table, shares


def test_all_ranks_get_one_measured_table(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(measured, 100_000, budget_s=2.0, nodes=[2, 1])
    tables = [table for table, _ in answers]
    assert tables[0] == tables[1] == tables[2]
    table, shares = answers[0]
    assert [row.num_bytes for row in table.rows] == sizes_up_to(100_000)
    for row in table.rows:
        assert set(row.milliseconds) == set(row.spread_ms) == {"ring", "hierarchical"}
        for name, (low, high) in row.spread_ms.items():
            assert low <= row.milliseconds[name] <= high
    assert table.source.startswith("measured, n=")
    assert table.made.endswith(f"torch {torch.__version__}")
    assert "us a step" in table.fit
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    where = Topology.build([0, 0, 1])
    write_table(table, tmp_path / "table.csv")
    read = read_table(tmp_path / "table.csv", where, "gloo")
    assert (read.made, read.fit, read.group_size) == (table.made, table.fit, None)
    sizes = [row.num_bytes for row in table.rows]
    assert [read.choose(size) for size in sizes] == [table.choose(size) for size in sizes]
    assert read.rows[0].spread_ms["ring"] == pytest.approx(table.rows[0].spread_ms["ring"], rel=1e-4)


def test_sizes_that_the_budget_does_not_reach_are_left_out(ranks: RankPool) -> None:
    (table, _), _ = ranks.run(measured, 1 << 24, budget_s=1e-3)
    assert [row.num_bytes for row in table.rows] == [256]


def measured_in_half() -> tuple[AllReduceTable, set[int]]:
    """The table, and how many numbers an all-reduce had."""
    numels: set[int] = set()
    timed_ms = tuner.timed_ms

    def counted(way: tuner.Way, numbers: torch.Tensor) -> float:
        numels.add(numbers.numel())
        return timed_ms(way, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "timed_ms", counted)
        return measured(1 << 12, budget_s=0.2, wire_dtype=torch.float16)[0], numels


def test_sizes_are_those_on_a_wire_of_16_bit(ranks: RankPool) -> None:
    (table, numels), _ = ranks.run(measured_in_half, world=2)
    assert {row.num_bytes for row in table.rows} == {2 * numel for numel in numels}
    assert table.source.endswith(", float16 wire")


def searched() -> AllReduceTable:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "SEARCH_BUDGET_S", 0.0)
        patch.setattr(tuner, "_clearly_best", lambda scores, default: max(k for k in scores if k != default))
        return measured(1 << 19, budget_s=1.0, search=True)[0]


def test_search_tries_groups_and_chunks(ranks: RankPool) -> None:
    tables = ranks.run(searched, nodes=[2, 2])
    assert len({str(table) for table in tables}) == 1
    assert tables[0].topology_key == "nodes2x2_groups4x1"
    assert (tables[0].group_size, tables[0].chunk_bytes) == (1, 4 << 20)


def test_default_stays_where_nothing_is_clearly_better() -> None:
    assert tuner._clearly_best({2: 1.0, 4: 0.9}, default=2) == 2
    assert tuner._clearly_best({2: 1.0, 4: 0.7}, default=2) == 4
    assert tuner._clearly_best({2: 1.0, 4: 1.5}, default=2) == 2


def test_other_groups() -> None:
    assert [t.key for t in tuner._other_groups(Topology.build([0, 0, 1, 1]))] == ["nodes2x2_groups4x1"]
    four = tuner._other_groups(Topology.build([rank // 4 for rank in range(16)]))
    assert [t.key for t in four] == ["nodes4x4_groups8x2", "nodes4x4_groups2x8"]
    assert tuner._other_groups(Topology.build([0, 0, 0, 1])) == []


def fit_twice_with_auto() -> tuple[list[str], list[str], str]:
    strategy = FourMinStrategy(table="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.allreduce.measure_table.AUTO_BUDGET_S", 1.0)
        first = info_lines_of_fit(strategy)
    path = cached_table_path(strategy.topology, "gloo")
    second = info_lines_of_fit(FourMinStrategy(table="auto"))
    dist.barrier()
    return first, second, path.read_text()


def test_auto_measures_once_and_keeps_the_table(ranks: RankPool) -> None:
    (first, second, text), _ = ranks.run(fit_twice_with_auto, nodes=[1, 1])
    assert any("measuring the all-reduce" in line for line in first)
    assert not any("measuring the all-reduce" in line for line in second)
    assert any("all-reduce (measured" in line for line in second)
    assert text.startswith("# topology_key: nodes2x1_groups2x1\n")
    assert "\n# made: 20" in text


def fit_with_groups_of_one(path: Path, group_size: int | None) -> str:
    """The topology that the run says it uses, or the error."""
    try:
        lines = info_lines_of_fit(FourMinStrategy(table=path, group_size=group_size))
    except ValueError as error:
        return str(error)
    return lines[-1].split(";")[0] if lines else "only rank 0 speaks"


def test_table_brings_the_groups_that_it_found_best(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    tuned = AllReduceTable.from_cost_model(Topology.build([0, 0], 1), "gloo")
    write_table(replace(tuned, group_size=1, chunk_bytes=1000), path)
    assert ranks.run(fit_with_groups_of_one, path, None)[0] == "fourmin: 2 ranks on 1 node, 2 x groups of 1"
    errors = ranks.run(fit_with_groups_of_one, path, 2)
    assert errors[0] == errors[1]
    assert "was measured for topology_key 'nodes1x2_groups2x1', but this run has 'nodes1x2_groups1x2'" in errors[0]


def test_sizes_reach_the_largest() -> None:
    assert sizes_up_to(1) == [256]
    assert sizes_up_to(4097) == [256, 1024, 4096, 4100]
    assert sizes_up_to(4096) == [256, 1024, 4096]


def crossing_table() -> AllReduceTable:
    rows = [
        Row(256, {"ring": 4.0, "hierarchical": 1.0}, {"ring": (3.0, 5.0), "hierarchical": (1.0, 1.0)}),
        Row(1256, {"ring": 5.0, "hierarchical": 9.0}, {"ring": (5.0, 5.0), "hierarchical": (8.0, 9.5)}),
    ]
    return AllReduceTable("nodes2x2_groups2x2", "gloo", "made up", tuple(rows))


def test_switch_points_are_where_the_lines_cross() -> None:
    # 4 + x / 1000 and 1 + 8 x / 1000 meet at x = 3000 / 7.
    assert crossing_table().switch_points() == [(256 + 429, "hierarchical", "ring")]
    assert crossing_table().only("ring").switch_points() == []


def test_picture_shows_algorithms_and_switch_points(tmp_path: Path) -> None:
    draw(crossing_table(), tmp_path / "new" / "curves.svg")
    text = (tmp_path / "new" / "curves.svg").read_text()
    for words in ("685 B: hierarchical to ring", "nodes2x2_groups2x2", "ms, median and quartiles"):
        assert words in text
