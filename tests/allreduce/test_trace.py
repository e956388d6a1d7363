"""The trace: one file of all ranks, on one clock, whose spans nest and come in order, also when a rank is gone."""

import itertools
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce import trace as trace_module
from lightning_fourmin.allreduce.trace import Trace
from tests.support.pool import RankFailure, RankPool
from tests.support.ranks import current_case
from tests.support.training import Regression, data, rank_trainer

STAGES = ("reduce", "scatter", "gather", "broadcast")
SHIFT_NS = 1000 * 10**9

Spans = list[dict[str, Any]]


def traced_fit(folder: Path, num_fits: int = 1) -> None:
    rank = current_case().rank
    with pytest.MonkeyPatch.context() as patch:
        clock = time.perf_counter_ns
        for module in ("comm.trace", "comm.engine"):
            patch.setattr(f"lightning_fourmin.{module}.now_ns", lambda: clock() + SHIFT_NS * rank)
        for number in range(num_fits):
            strategy = FourMinStrategy(trace=True, algorithm="hierarchical", fusion_mb=1e-5)
            trainer = rank_trainer(strategy, max_steps=2 + number, default_root_dir=folder)
            trainer.fit(Regression(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))), data(4))


def lanes_and_tracks(events: Spans, rank: int) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Spans by lane and by piece, each with `start` and `stop`; fails where a track does not nest."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    lanes: dict[str, Spans] = defaultdict(list)
    tracks: dict[str, Spans] = defaultdict(list)
    opened: dict[str, Spans] = defaultdict(list)
    for event in events:
        if event["pid"] != rank or event["ph"] == "M":
            continue
        if event["ph"] == "X":
            span = {"start": event["ts"], "stop": event["ts"] + event["dur"], **event}
            lanes[names[event["tid"]]].append(span)
        elif event["ph"] == "b":
            opened[event["id"]].append({"start": event["ts"], **event})
        else:
            span = opened[event["id"]].pop()
            assert span["name"] == event["name"], "a track closes what it opened last"
            tracks[event["id"]].append({**span, "stop": event["ts"], "depth": len(opened[event["id"]])})
    assert not any(opened.values())
    return dict(lanes), dict(tracks)


def check_nesting(spans: Spans) -> None:
    """Two spans of a lane are apart, or one holds the other."""
    around: Spans = []
    for span in sorted(spans, key=lambda s: (s["start"], -s["stop"])):
        while around and around[-1]["stop"] <= span["start"]:
            around.pop()
        assert not around or span["stop"] <= around[-1]["stop"] + 1e-3, (span, around[-1])
        around.append(span)


def inside(spans: Spans, outer: dict[str, Any]) -> list[str]:
    held = [s for s in spans if outer["start"] <= s["start"] and s["stop"] <= outer["stop"] + 1e-3 and s is not outer]
    return [s["name"] for s in sorted(held, key=lambda s: (s["start"], -s["stop"]))]


def test_one_trace_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(traced_fit, tmp_path, 2, nodes=[2, 2])
    assert [path.name for path in tmp_path.iterdir()] == ["fourmin_trace.json"]
    whole = json.loads((tmp_path / "fourmin_trace.json").read_text())
    assert whole["metadata"] == {"ranks_without_spans": []}
    events = whole["traceEvents"]
    everyones = [lanes_and_tracks(events, rank) for rank in range(4)]
    for rank, (lanes, tracks) in enumerate(everyones):
        # Leaders have all phases; the others meet nobody between the nodes.
        phases = list(STAGES) if rank % 2 == 0 else ["reduce", "broadcast"]
        threads = [*phases[1:], "finish"]
        assert set(lanes) == {"main", *threads}
        for spans in lanes.values():
            check_nesting(spans)
        main = sorted(lanes["main"], key=lambda s: s["start"])
        top = [s["name"] for s in main if s["name"] in ("training_step", "backward", "optimizer")]
        assert top == ["training_step", "backward", "optimizer"] * 3, "of the second fit, which replaces the first"
        backwards = [s for s in main if s["name"] == "backward"]
        for backward in backwards[1:]:
            assert inside(main, backward) == [name for i in range(4) for name in (f"bucket {i}", "copy")]
        assert len(tracks) == sum(inside(main, backward).count("copy") for backward in backwards)
        for piece, spans in tracks.items():
            ordered = sorted((s for s in spans if s["name"] != "queue"), key=lambda s: s["start"])
            assert [s["name"] for s in ordered] == phases, piece
            for before, after in itertools.pairwise(ordered):
                assert before["stop"] <= after["start"] + 1e-3
            assert [s["name"] for s in spans].count("queue") == len(threads)
            stages = {lane: s for lane in lanes for s in lanes[lane] if s["args"].get("piece") == int(piece)}
            starts = [stages[lane]["start"] for lane in threads]
            assert starts == sorted(starts)
    # An exchange is over on no rank before it has begun on all: only clocks on one line can show that.
    for piece in everyones[0][1]:
        spans = [s for leader in (0, 2) for s in everyones[leader][1][piece] if s["name"] == "scatter"]
        assert min(s["stop"] for s in spans) > max(s["start"] for s in spans) - 0.05e6


def die_before_the_end(folder: Path) -> None:
    trace = Trace(dist.get_rank(), dist.get_world_size())
    trace.align(torch.device("cpu"))
    with trace.span("main", "work"):
        pass
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.allreduce.trace.GATHER_S", 1.0)
        trace.write_merged(str(folder))


def test_a_dead_rank_is_named_and_the_others_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 died"):
        ranks.run(die_before_the_end, tmp_path, world=3)
    whole = json.loads((tmp_path / "fourmin_trace.json").read_text())
    assert whole["metadata"] == {"ranks_without_spans": [1]}
    assert {e["pid"] for e in whole["traceEvents"] if e["name"] == "work"} == {0, 2}


def long_trace(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.allreduce.trace.MAX_SPANS", 20)
        patch.setattr("lightning_fourmin.allreduce.trace.CHUNK_BYTES", 7)
        trace = Trace(dist.get_rank(), dist.get_world_size())
        trace.align(torch.device("cpu"))
        for number in range(100):
            trace.add("main", f"step {number}", trace_module.now_ns())
        trace.write_merged(str(folder))


def test_a_trace_that_cannot_be_written_does_not_undo_a_fit(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks.run(traced_fit, tmp_path / "file", world=2)
    assert (tmp_path / "file").read_text() == ""


def test_memory_is_bounded_by_keeping_the_last_spans(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(long_trace, tmp_path)
    events = json.loads((tmp_path / "fourmin_trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert names == [f"step {number}" for number in range(90, 100)]
