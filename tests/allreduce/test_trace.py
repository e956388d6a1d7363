"""The trace: one file of all ranks, on one clock, whose spans nest and come in order, also when a rank is gone."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.measure import Spans, Trace, merge_traces
from lightning_fourmin.cli import main
from tests.support.pool import RankFailure, RankPool
from tests.support.ranks import current_case
from tests.support.training import Regression, data, rank_trainer

STAGES = ("reduce", "scatter", "gather", "broadcast")
SHIFT_NS = 1000 * 10**9

Events = list[dict[str, Any]]


def traced_fit(folder: Path, num_fits: int = 1) -> None:
    rank = current_case().rank
    with pytest.MonkeyPatch.context() as patch:
        clock = time.perf_counter_ns
        patch.setattr("lightning_fourmin.allreduce.measure.now_ns", lambda: clock() + SHIFT_NS * rank)
        for number in range(num_fits):
            strategy = FourMinStrategy(trace=True, algorithm="hierarchical", fusion_mb=1e-5)
            trainer = rank_trainer(strategy, max_steps=2 + number, default_root_dir=folder)
            trainer.fit(Regression(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))), data(4))


def lanes_and_tracks(events: Events, rank: int) -> tuple[dict[str, Events], dict[str, Events]]:
    """Spans by lane and by piece, each with `start` and `stop`; fails where a track does not nest."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    lanes: dict[str, Events] = defaultdict(list)
    tracks: dict[str, Events] = defaultdict(list)
    opened: dict[str, Events] = defaultdict(list)
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


def check_nesting(spans: Events) -> None:
    """Two spans of a lane are apart, or one holds the other."""
    around: Events = []
    for span in sorted(spans, key=lambda s: (s["start"], -s["stop"])):
        while around and around[-1]["stop"] <= span["start"]:
            around.pop()
        assert not around or span["stop"] <= around[-1]["stop"] + 1e-3, (span, around[-1])
        around.append(span)


def inside(spans: Events, outer: dict[str, Any]) -> list[str]:
    held = [s for s in spans if outer["start"] <= s["start"] and s["stop"] <= outer["stop"] + 1e-3 and s is not outer]
    return [s["name"] for s in sorted(held, key=lambda s: (s["start"], -s["stop"]))]


def test_one_trace_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(traced_fit, tmp_path, 2, nodes=[2, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"fourmin_trace.rank{rank}.json" for rank in range(4)]
    merged = merge_traces(tmp_path)
    assert merged == tmp_path / "fourmin_trace.json"
    whole = json.loads(merged.read_text())
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
    trace, spans = Trace(dist.get_rank(), dist.get_world_size()), Spans(torch.device("cpu"))
    trace.align(torch.device("cpu"))
    spans.listen(trace)
    with spans.during("work"):
        pass
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    trace.write(str(folder))


def test_a_dead_rank_is_named_and_the_others_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    """Also where it is rank 0 that died: no rank needs another one to write its spans."""
    with pytest.raises(RankFailure, match="rank 0 died"):
        ranks.run(die_before_the_end, tmp_path, world=3)
    merged = merge_traces(tmp_path)
    assert merged is not None
    whole = json.loads(merged.read_text())
    assert whole["metadata"] == {"ranks_without_spans": [0]}
    assert {e["pid"] for e in whole["traceEvents"] if e["name"] == "work"} == {1, 2}


ENDS_WITHOUT_TEARDOWN = """
import sys, torch, torch.distributed as dist
from lightning_fourmin.allreduce.measure import Spans, Trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
trace, spans = Trace(0, 1), Spans(torch.device("cpu"))
trace.align(torch.device("cpu"))
trace.write_at_exit(sys.argv[1])
spans.listen(trace)
with spans.during("work"):
    raise RuntimeError("boom")
"""


def test_a_process_that_crashes_leaves_its_spans(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_TEARDOWN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "boom" in run.stderr
    events = json.loads((tmp_path / "fourmin_trace.rank0.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["work"]


def write_trace(folder: Path, world: int) -> None:
    """One span of each rank; `world` ranks take part in the run that is traced."""
    trace, spans = Trace(dist.get_rank(), world), Spans(torch.device("cpu"))
    trace.align(torch.device("cpu"))
    spans.listen(trace)
    with spans.during(f"work of {world}"):
        pass
    trace.write(str(folder))


def test_files_of_an_earlier_run_are_left_out(ranks: RankPool, tmp_path: Path) -> None:
    assert merge_traces(tmp_path) is None
    ranks.run(write_trace, tmp_path, 3, world=3)
    ranks.run(write_trace, tmp_path, 2, world=2)
    merged = merge_traces(tmp_path)
    assert merged is not None
    whole = json.loads(merged.read_text())
    assert whole["metadata"] == {"ranks_without_spans": []}
    assert {(e["pid"], e["name"]) for e in whole["traceEvents"] if e["ph"] == "X"} == {(r, "work of 2") for r in (0, 1)}


def long_trace(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fourmin.allreduce.measure.MAX_SPANS", 20)
        trace, spans = Trace(dist.get_rank(), dist.get_world_size()), Spans(torch.device("cpu"))
        trace.align(torch.device("cpu"))
        spans.listen(trace)
        for number in range(100):
            spans.add("main", f"step {number}", spans.now())
        trace.write(str(folder))


def test_a_trace_that_cannot_be_written_does_not_undo_a_fit(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks.run(traced_fit, tmp_path / "file", world=2)
    assert (tmp_path / "file").read_text() == ""


def test_memory_is_bounded_by_keeping_the_last_spans(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(long_trace, tmp_path)
    for rank in range(2):
        events = json.loads((tmp_path / f"fourmin_trace.rank{rank}.json").read_text())["traceEvents"]
        names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert names == [f"step {number}" for number in range(90, 100)]


def test_report_merges_the_traces_of_a_trainer_without_a_record(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(write_trace, tmp_path, 2, world=2)
    monkeypatch.setattr(sys, "argv", ["fourmin", "report", f"run={tmp_path}"])
    main()
    assert capsys.readouterr().out == f"{tmp_path / 'fourmin_trace.json'}\n"
