"""run.json: written and read back, and errors that name file and field."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fourmin.allreduce.plan import CommOptions, CommPlan
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import RunError
from lightning_fourmin.runs.record import BucketRecord, RunRecord, Summary, TableRecord
from tests.support.runs import RUN


def test_read_gives_what_was_written(tmp_path: Path) -> None:
    for record in (RUN, replace(RUN, status="failed", error="no <data>", model=None, table=None, fusion_plan=None)):
        record.write(tmp_path)
        assert RunRecord.read(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["format"] == 1


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    replace(RUN, summary=Summary(val_loss=math.nan, S=math.inf, top1=0.5)).write(tmp_path)
    assert "NaN" not in (tmp_path / "run.json").read_text()
    assert RunRecord.read(tmp_path).summary == Summary(top1=0.5)


def test_records_of_plan_objects() -> None:
    parameters = [("conv.weight", nn.Parameter(torch.zeros(900))), ("fc.bias", nn.Parameter(torch.zeros(124)))]
    options = CommOptions("torus", wire_dtype="fp16")
    (row,) = CommPlan.decide(options, Topology.build([0, 0, 1, 1]), "gloo", parameters=parameters).rows
    content = (2, 4096, "float32", "fc.bias", "conv.weight")
    sent = (2048, "float16", "dense", "torus", 1, round(row.expected_ms or 0, 4), "rounded to fp16")
    assert BucketRecord.of(row) == BucketRecord(*content, *sent)
    assert BucketRecord.of(row, is_sent=False) == BucketRecord(*content)
    assert BucketRecord.of(replace(row, expected_ms=None)).expected_ms is None
    table = AllReduceTable.from_cost_model(Topology.build([0, 0, 1, 1]), "gloo").with_switch(1024)
    record = TableRecord.of(table)
    assert (record.source, record.topology_key, record.backend) == ("cost model", table.topology_key, "gloo")
    assert [row.choice for row in record.rows[:3]] == ["hierarchical", "hierarchical", "ring"]
    assert record.rows[0].milliseconds == table.rows[0].milliseconds


def changed(way: str, value: Any) -> str:
    """The record as JSON with one field changed, or left out where the value is `...`."""
    content = json.loads(json.dumps({"format": 1, **asdict(RUN)}))
    *parents, last = way.split(".")
    place = content
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "run.json cannot be read: Expecting property name"),
        ("[]", "run.json has no field format: `fourmin train` did not write it"),
        (changed("format", 7), "run.json has format 7, but this version reads format 1"),
        (changed("name", ...), "run.json: field name is missing"),
        (changed("hardware.cpu", ...), "run.json: field hardware.cpu is missing"),
        (changed("hardware", None), "run.json: field hardware is null, but it has to be an object"),
        (changed("seconds", "long"), 'run.json: field seconds is "long", but it has to be a number'),
        (changed("world_size", 2.5), "run.json: field world_size is 2.5, but it has to be a whole number"),
        (changed("world_size", True), "run.json: field world_size is true, but it has to be a whole number"),
        (changed("arithmetic", "x"), 'run.json: field arithmetic is "x", but it has to be a list'),
        (changed("overrides", [3]), "run.json: field overrides[0] is 3, but it has to be a string"),
        (changed("versions", {"torch": 2}), "run.json: field versions.torch is 2, but it has to be a string"),
        (
            changed("status", "gone"),
            'run.json: field status is "gone", but it has to be one of running, done, failed, interrupted',
        ),
        (
            changed("table.rows.1.milliseconds", {"ring": "1"}),
            'run.json: field table.rows[1].milliseconds.ring is "1", but it has to be a number',
        ),
        (changed("fusion_plan.0.num_bytes", ...), "run.json: field fusion_plan[0].num_bytes is missing"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError) as caught:
        RunRecord.read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_no_run_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="does not exist: name a folder that `fourmin train` made, of a run or of a sweep"
    ):
        RunRecord.read(tmp_path)
