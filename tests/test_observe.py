"""What a run tells about its communication: the trace, the stall warning and the measured table."""

import json
import logging
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.comm.engine import Engine
from lightning_fourmin.comm.groups import ProcessGroups
from lightning_fourmin.comm.table import AllReduceTable, cached_table_path, sizes_up_to
from lightning_fourmin.comm.topology import Topology
from lightning_fourmin.comm.tuner import measure_table
from pool import RankPool
from ranks import current_case
from training import Regression, data, rank_trainer


def fit(strategy: FourMinStrategy, **kwargs: Any) -> list[str]:
    """Fits two steps; gives the info lines of the strategy."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        trainer = rank_trainer(strategy, max_steps=2, **kwargs)
        trainer.fit(Regression(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))), data(4))
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if line.startswith("fourmin")]


def traced_fit(folder: Path) -> None:
    fit(FourMinStrategy(trace=True, algorithm="hierarchical", fusion_mb=1e-4), default_root_dir=folder)


def test_each_rank_writes_a_chrome_trace(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(traced_fit, tmp_path, nodes=[1, 1])
    for rank in range(2):
        events = json.loads((tmp_path / "fourmin_trace" / f"rank{rank}.json").read_text())["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [e for e in events if e["ph"] == "X"]
        assert {lanes[e["tid"]] for e in spans} == {"scatter", "gather", "finish", "main"}
        backwards = [e for e in spans if e["name"] == "backward"]
        assert len(backwards) == 2
        first = min(backwards, key=lambda e: e["ts"])
        finished = [e for e in spans if lanes[e["tid"]] == "finish" and e["ts"] < first["ts"] + first["dur"]]
        assert finished, "no bucket finished inside the first backward"
        for piece in {e["args"]["piece"] for e in finished}:
            stages = [e for e in spans if e["args"].get("piece") == piece]
            order = [lanes[e["tid"]] for e in sorted(stages, key=lambda e: e["ts"])]
            assert order == ["scatter", "gather", "finish"]


def late_rank() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_fourmin.comm.stall").addHandler(handler)
    topology = Topology.build([0, 1])
    table = AllReduceTable.from_cost_model(topology, "gloo").only("hierarchical")
    groups = ProcessGroups.shared(timedelta(seconds=60))
    with closing(Engine(topology, table, groups, torch.device("cpu"), stall_warning_s=0.2)) as engine:
        if current_case().rank == 1:
            time.sleep(1.5)
        engine.submit(torch.ones(1000), 7).wait()
    return lines


def test_a_long_wait_is_said_once_while_it_lasts(ranks: RankPool) -> None:
    waiting, late = ranks.run(late_rank, nodes=[1, 1])
    assert late == []
    assert len(waiting) == 1
    assert "bucket 7" in waiting[0]
    assert "phase gather of the hierarchical all-reduce" in waiting[0]
    assert "waited for rank 1 for more than 0.2 s" in waiting[0]


def measured() -> AllReduceTable:
    nodes = current_case().nodes
    topology = Topology.build([node for node, size in enumerate(nodes) for _ in range(size)])
    groups = ProcessGroups.shared(timedelta(seconds=60))
    return measure_table(topology, groups, torch.device("cpu"), largest_bytes=100_000, budget_s=5.0)


def test_all_ranks_get_one_measured_table(ranks: RankPool) -> None:
    tables = ranks.run(measured, nodes=[2, 1])
    assert tables[0] == tables[1] == tables[2]
    assert [row.num_bytes for row in tables[0].rows] == sizes_up_to(100_000)
    assert set(tables[0].rows[0].milliseconds) == {"ring", "hierarchical"}
    assert tables[0].source.startswith("measured")


def test_sizes_reach_the_largest() -> None:
    assert sizes_up_to(1) == [256]
    assert sizes_up_to(4097) == [256, 1024, 4096, 4100]
    assert sizes_up_to(4096) == [256, 1024, 4096]


def fit_twice_with_auto() -> tuple[list[str], list[str], str]:
    strategy = FourMinStrategy(table="auto")
    first = fit(strategy)
    path = cached_table_path(strategy.topology, "gloo")
    second = fit(FourMinStrategy(table="auto"))
    return first, second, path.read_text()


def test_auto_measures_once_and_keeps_the_table(ranks: RankPool) -> None:
    (first, second, text), _ = ranks.run(fit_twice_with_auto, nodes=[1, 1])
    assert any("measuring the all-reduce" in line for line in first)
    assert not any("measuring the all-reduce" in line for line in second)
    assert any("all-reduce (measured" in line for line in second)
    assert text.startswith("# topology_key: nodes2x1_groups2x1\n")
