"""The command line: verbs as users type them, errors as one sentence and exit code 1."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import hydra
import pytest

from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.data.datamodule import ShardDataModule
from lightning_fourmin.data.pack.pack import PackOptions
from lightning_fourmin.data.pack.verify import VerifyOptions
from tests.support.runs import write_run
from tests.support.shards import jpeg

Fourmin = Callable[..., tuple[int, str, str]]


def test_pack_and_verify(fourmin: Fourmin, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "images" / name / f"{number}.jpg").write_bytes(jpeg(9, 9, number))
    code, output, errors = fourmin("pack", "src=images", "out=shards", "shard_count=2", "num_workers=1")
    assert code == 0, errors
    assert output == "shards: split train has 6 images of 2 classes in 2 shards, 0.0 MB\n"
    assert "6/6" in errors
    code, output, _ = fourmin("verify", "path=shards", "decode=true", "num_workers=1")
    assert (code, output) == (0, "split train: 6 samples in 2 shards, 0.0 MB\nno faults\n")
    shard = tmp_path / "shards" / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1024])
    code, _, errors = fourmin("verify", "path=shards", "num_workers=1")
    assert code == 1
    assert "train-000001.tar has num_bytes" in errors
    assert errors.endswith("fourmin verify: shards has 2 faults\n")
    assert "Traceback" not in errors
    # Hydra leaves nothing behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "shards"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack"], "fourmin pack: out, src: not given; `fourmin pack --help` lists the keys\n"),
        (["pack", "src=nowhere", "out=x"], "fourmin pack: src=nowhere is not a folder\n"),
        (["verify", "path=nowhere"], "fourmin verify: nowhere/index.json does not exist: pack the shards with"),
        (
            ["pack", "src=.", "out=x", "seed=many"],
            "fourmin pack: seed: Value 'many' of type 'str' could not be converted to Integer\n",
        ),
        (["pack", "xyz=3"], "fourmin pack: Could not override 'xyz': `fourmin pack --help` lists the keys\n"),
        (["pack", "src"], "fourmin pack: 'src' is not understood: arguments are key=value, and values with special"),
        (["pack", "src=/dev", "out=/proc/x"], "fourmin pack: src=/dev has no images"),
        (["plan", "model=resnet_small", "out=/dev/null"], "fourmin plan: /dev/null: "),
        (
            ["plan", "cluster=null"],
            "fourmin plan: Config group override must be a string or a list. Got NoneType: a group is left out with ~",
        ),
        (["tune", "out=."], "fourmin tune: out=. must be a file whose name ends in .csv\n"),
        (["tune", "out=table.svg"], "fourmin tune: out=table.svg must be a file whose name ends in .csv\n"),
        (["tune", "-m", "devices=1,2"], "fourmin tune: its jobs would write one table over the other: call it once"),
        (["report"], "fourmin report: run: not given; `fourmin report --help` lists the keys\n"),
        (
            ["report", "run=nowhere"],
            "fourmin report: nowhere/run.json does not exist: name a folder that `fourmin train` made, of a run or of",
        ),
    ],
)
def test_errors_are_one_sentence(fourmin: Fourmin, arguments: list[str], message: str) -> None:
    code, _, errors = fourmin(*arguments)
    assert code == 1
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_report(fourmin: Fourmin, tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    assert fourmin("report", "run=one") == (0, "one/report.html\n", "")
    # As from inside a sweep; Hydra takes the name for a number.
    write_run(tmp_path / "3")
    assert fourmin("report", "run=3") == (0, "3/report.html\n", "")
    for job in ("0", "1"):
        write_run(tmp_path / "many" / job)
    (tmp_path / "many" / "1" / "metrics.csv").write_text("step,lr\n0,fast\n")
    assert fourmin("report", "run=many") == (0, "many/report.html\n", "")
    assert (tmp_path / "many" / "0" / "report.html").is_file()
    assert "line 2: column lr holds no number" in (tmp_path / "many" / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "many", "one"]


def test_jobs_of_a_plan_have_folders_of_their_own(fourmin: Fourmin, tmp_path: Path) -> None:
    code, output, _ = fourmin("plan", "-m", "model=resnet_small", "num_ranks=8,16", "most_ranks=16", "out=some/plan")
    assert code == 0
    assert "plan.svg and trace.json in some/plan/1" in output
    plans = [json.loads((tmp_path / "some" / "plan" / number / "plan.json").read_text()) for number in "01"]
    assert [plan["prediction"]["N"] for plan in plans] == [8, 16]


def test_help(fourmin: Fourmin) -> None:
    code, output, _ = fourmin()
    assert code == 0
    assert "pack     image folder -> tar shards with an index" in output
    for verb, options in (("pack", PackOptions), ("verify", VerifyOptions)):
        code, output, _ = fourmin(verb, "--help")
        assert code == 0
        assert f"Example: fourmin {verb} " in output
        for field in fields(options):
            assert re.search(rf"^{field.name} +\w", output, re.MULTILINE), field.name
            assert f"\n{field.name}: " in output
    code, _, errors = fourmin("fly")
    assert code == 2
    assert "invalid choice: 'fly' (choose from 'train', 'pack', 'verify', " in errors


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
def test_data_configs_make_data_modules(name: str) -> None:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(overrides=[f"+data={name}", "data.path=digits"])
    assert isinstance(hydra.utils.instantiate(config.data), ShardDataModule)
