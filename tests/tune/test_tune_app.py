"""`fourmin tune` as users type it: table and picture, a sentence at the end, and the error for each mistake."""

import contextlib
import io
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.buckets import MIB
from lightning_fourmin.allreduce.table import read_table
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.cli import main
from lightning_fourmin.cli.tune import check_net, net_and_inputs
from lightning_fourmin.models import build_model
from lightning_fourmin.tune.tuner import TuneOptions, tune
from tests.support.pool import RankPool
from tests.support.ranks import current_case
from tests.support.training import Regression, data, rank_trainer

NETS_OF = "tests.simulate.test_plan"
"""The module that holds nets to plan for, as `module=` names it."""

NETS: dict[str, dict[str, Any]] = {
    "model": {"model": "resnet_small", "num_classes": 2, "image_size": 8},
    "module": {
        "module": "lightning_fourmin.models:build_model",
        "module_options": {"name": "resnet_small", "num_classes": 2},
        "input_shape": [3, 8, 8],
    },
}


def tune_and_fit(path: Path, net: dict[str, Any]) -> tuple[str, int]:
    """What the tuner printed, and the fusion threshold of the next start."""
    options = TuneOptions(budget_s=1.0, largest_mb=0.1, out=str(path), batch_size=2, **net)
    check_net(options)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tune(options, current_case().node_rank, torch.device("cpu"), partial(net_and_inputs, options))
    strategy = FourMinStrategy(table=path)
    trainer = rank_trainer(strategy, max_steps=1)
    trainer.fit(Regression(build_model("resnet_small", 2)), data(3, 8, 8))
    assert strategy.fusion_plan is not None
    return printed.getvalue(), strategy.fusion_plan.threshold_bytes


@pytest.mark.parametrize("net", NETS)
def test_next_start_uses_what_was_found(ranks: RankPool, tmp_path: Path, net: str) -> None:
    (printed, first), (nothing, second), _ = ranks.run(tune_and_fit, tmp_path / "table.csv", NETS[net], nodes=[2, 1])
    assert nothing == ""
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.svg"]
    lines = printed.splitlines()
    assert "all-reduce table for nodes1x2+1x1_groups1x2+1x1 on gloo (measured, n=" in printed
    assert any(line.startswith("links: inside ") and "off by" in line for line in lines)
    end = lines.index(next(line for line in lines if line.startswith("fastest: ")))
    # A plan that is alone needs no search.
    if "steps with each plan:" in lines:
        tried = [re.split(r" ms  n=\d+  ", line) for line in lines[lines.index("steps with each plan:") + 1 : end]]
        _, fastest = min((float(ms), how) for ms, how in tried)
        assert lines[end] == f"fastest: {fastest}"
    fastest = lines[end].removeprefix("fastest: ")
    three = [re.fullmatch(r" *([\d.]+) ms  (.*)", line) for line in lines[-5:-2]]
    assert [row and row[2] for row in three] == ["without communication", "ddp", "fourmin"]
    assert re.fullmatch(r"steps in \d+ rounds? of these three:", lines[-6])
    # The plan itself, a row a bucket.
    head, *rows = lines[end + 1 : -6]
    assert re.split(" {2,}", head.strip()) == [
        "what",
        "tensors",
        "on the wire",
        "form",
        "all-reduce",
        "expected",
        "exactness",
    ]
    assert [row.split()[0] for row in rows] == [str(number) for number in range(len(rows))]
    assert re.match(rf"fusion_mb=\S+, {len(rows)} buckets?, ", fastest)
    assert all(row.endswith("equal up to the order of summation") for row in rows)
    assert lines[-2] == f"table: {tmp_path / 'table.csv'}, picture: {tmp_path / 'table.svg'}"
    assert lines[-1].startswith("Will it help you? ")
    assert " ms a step with ddp, " in lines[-1]
    threshold_mb = float(re.findall(r"^fusion_mb=([\d.e-]+),", fastest)[0])
    assert first == int(threshold_mb * MIB)
    assert f"# fusion_mb: {threshold_mb}" in (tmp_path / "table.csv").read_text()


def fourmin(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["fourmin", "tune", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_local_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = fourmin(monkeypatch, "accelerator=cpu", "budget_s=1", "largest_mb=0.01", "out=new/table.csv")
    output, errors = capfd.readouterr()
    assert code == 0, errors
    read_table(tmp_path / "new" / "table.csv", Topology.build([0, 0]), "gloo", any_groups=True)
    assert (tmp_path / "new" / "table.svg").read_text().startswith("<?xml")
    assert "measuring all-reduce" in output
    assert output.strip().splitlines()[-1].startswith("Will it help you? ")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("devices=0", "devices=0 must be above 0"),
        ("budget_s=-1", "budget_s=-1.0 must be above 0"),
        ("wire_dtype=fp8", "wire_dtype=fp8 is not known: choose one of null, fp32, fp16, bf16"),
        ("model=resnet51", "model=resnet51 is not known: did you mean resnet50?"),
        (
            f"module={NETS_OF}:Gone",
            f"module={NETS_OF}:Gone cannot be imported (module '{NETS_OF}' has",
        ),
        (f"module={NETS_OF}:Tiny", "input_shape is not given: module needs the shape of one sample"),
        (
            f"module={NETS_OF}:Tiny input_shape=[5]",
            "Tiny cannot be trained with an input of [5] (mat1 and mat2",
        ),
        (
            f"module={NETS_OF}:Tiny input_shape=[-1]",
            "Tiny cannot be trained with an input of [-1] (Trying to create",
        ),
        ("model=resnet_small input_shape=[0]", "ResNet cannot be trained with an input of [0] (Expected 3D"),
        ("model=resnet_small model.compile=true", "model.compile is for training: of a model only its name and"),
        ("model=resnet_small model.model=resnet51", "model='resnet51' is not known: did you mean 'resnet50'?"),
        (
            "model=alexnet_bn_small +model.model_options.depth=3",
            "model=alexnet_bn_small cannot be made with model.model_options (alexnet_bn_small() got an unexpected",
        ),
        (
            f"module={NETS_OF}:Tiny model=resnet50",
            f"model=resnet50 and module={NETS_OF}:Tiny: give one of them",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert fourmin(monkeypatch, *arguments.split()) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"fourmin tune: {message}")
    assert errors.count("\n") == 1


def test_options_of_the_model_are_those_of_the_net() -> None:
    options = TuneOptions(model="alexnet_bn_small", num_classes=2, image_size=16, model_options={"bn5": False})
    check_net(options)
    net, inputs = net_and_inputs(options)
    assert "bn5" not in dict(net.named_children())
    assert inputs.shape == (32, 3, 16, 16)
    for other, side in (
        (replace(options, model_options={"image_size": 24}), 24),
        (replace(options, image_size=None), 32),
    ):
        check_net(other)
        _, inputs = net_and_inputs(other)
        assert inputs.shape == (32, 3, side, side)


def test_launcher_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fourmin.cli.tune import _started

    def started(**variables: Any) -> tuple[int, int]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            return _started(TuneOptions(devices=3))

    assert started() == (3, 1)
    assert started(TORCHELASTIC_RUN_ID=1, RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4) == (4, 2)
    slurm = {"SLURM_NTASKS": 6, "SLURM_JOB_NAME": "train", "SLURM_NNODES": 3, "SLURM_PROCID": 0}
    assert started(**slurm) == (3, 1), "in a batch script"
    assert started(**slurm, SLURM_STEP_ID=0) == (2, 3)
