"""The command line: verbs as users type them, errors as one sentence and exit code 1."""

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_fourmin.app import main
from lightning_fourmin.app.verb import CONF
from lightning_fourmin.data.datamodule import ShardDataModule
from lightning_fourmin.data.pack import PackOptions
from lightning_fourmin.data.verify import VerifyOptions
from shards import jpeg

Fourmin = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fourmin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fourmin:
    """Runs the command in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["fourmin", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


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
            "fourmin pack: seed: Value 'many' of type 'str' could not be converted",
        ),
        (["pack", "shards=3"], "Could not override 'shards'."),
    ],
)
def test_errors_are_one_sentence(fourmin: Fourmin, arguments: list[str], message: str) -> None:
    code, _, errors = fourmin(*arguments)
    assert code == 1
    assert errors.startswith(message)
    assert "Traceback" not in errors


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
    assert "invalid choice: 'fly' (choose from 'pack', 'verify')" in errors


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
def test_data_configs_make_data_modules(name: str) -> None:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(overrides=[f"+data={name}", "data.path=digits"])
    assert isinstance(hydra.utils.instantiate(config.data), ShardDataModule)
