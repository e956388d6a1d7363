"""The large-batch table of the benchmarks: rows differ in what they say, runs become small files, files a table."""

import math
import re
import shlex
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import OmegaConf

from benchmarks.naive_half import NaiveHalfPrecision
from large_batch import EFFECTS, MODELS, RECIPES_IN_FP32, ROWS, Comparison, report
from large_batch_runs import keep, read_rows
from lightning_fourmin.cli.hydra_app import CONF as PACKAGE_CONF
from lightning_fourmin.runs.metrics import read_metrics
from tests.support.composing import composed
from tests.support.runs import RUN, write_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONF = BENCHMARKS / "large_batch" / "conf"
LARS = {"optim._target_", "optim.lr", "optim.trust_coefficient", "optim.eps", "optim.form"}
NO_DECAY = {"model.decay_all"}
BN5 = {"model.model_options.bn5"}
FP16 = {"precision._target_", "precision.dtype", "precision.loss_scale"}
CHANGES = [
    ("alexnet_baseline", "alexnet_sgd", {"global_batch"}),
    ("alexnet_sgd", "alexnet_lars", LARS | {"schedule.base_batch"}),
    ("alexnet_lars", "alexnet_no_decay", NO_DECAY),
    ("alexnet_no_decay", "alexnet_bn5", BN5),
    ("alexnet_bn5", "alexnet_fp16", FP16),
    ("alexnet_bn5", "alexnet_fp16_naive", {"precision._target_"}),
    ("alexnet_sgd", "alexnet_larger_sgd", {"global_batch"}),
    ("alexnet_fp16", "alexnet_larger_fp16", {"global_batch"}),
    ("resnet_baseline", "resnet_sgd", {"global_batch"}),
    ("resnet_sgd", "resnet_sgd_tuned", {"optim.lr", "optim.nesterov"}),
    ("resnet_sgd", "resnet_lars", LARS | {"schedule.base_batch", "optim.nesterov"}),
    ("resnet_lars", "resnet_no_decay", NO_DECAY),
    ("resnet_no_decay", "resnet_fp16", FP16),
    ("resnet_no_decay", "resnet_fp16_naive", {"precision._target_"}),
]
"""What a row changes of another."""


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix: config}
    return {key: value for name in config for key, value in flat(config[name], f"{prefix}.{name}".strip(".")).items()}


@cache
def config_of(row: str) -> dict[str, Any]:
    config = OmegaConf.to_container(
        composed(f"hydra.searchpath=[file://{CONF}]", f"experiment={row}", "run_dir=x"), resolve=True
    )
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


@pytest.mark.parametrize(("before", "after", "changed"), CHANGES)
def test_a_row_changes_what_it_says(before: str, after: str, changed: set[str]) -> None:
    first, second = flat(config_of(before)), flat(config_of(after))
    differing = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert differing == changed | {"name"}


@pytest.mark.parametrize("row", ["alexnet_fp16_naive", "resnet_fp16_naive"])
def test_naive_fp16_is_found_from_the_root_of_the_repository(row: str) -> None:
    assert type(instantiate(config_of(row)["precision"])) is NaiveHalfPrecision


def test_every_row_has_a_config_and_every_effect_its_rows() -> None:
    files = {path.stem for path in (CONF / "experiment").glob("*.yaml")}
    assert files == ROWS.keys() | {"shared"}
    assert {name for _, after, _ in CHANGES for name in [after]} | {"alexnet_baseline", "resnet_baseline"} == set(ROWS)
    assert {name for effect in EFFECTS for name in (effect.before, effect.after)} <= ROWS.keys()
    # A pass of 2 ranks divides each batch, and each batch the epoch: no step is smaller than the others.
    for name in ROWS:
        config = config_of(name)
        assert config["global_batch"] % (2 * config["data"]["batch_size"]) == 0
        assert 10_000 % config["global_batch"] == 0


def test_the_command_trains_the_rows_and_nothing_else() -> None:
    searched = create_config_search_path(str(PACKAGE_CONF))
    searched.append("rows", f"file://{CONF}")
    parser = OverridesParser.create(config_loader=ConfigLoaderImpl(searched))
    jobs: list[tuple[str, ...]] = []
    for arguments in re.findall(r"^sweep \w+ (.+)", (CONF.parent / "run.sh").read_text(), re.MULTILINE):
        seeds, rows = (
            list(one.sweep_string_iterator()) if one.is_sweep_override() else [str(one.value())]
            for one in parser.parse_overrides(shlex.split(arguments))
        )
        jobs += product(rows, seeds)
    spread = [name for name in ROWS if name.startswith("alexnet_") and "larger" not in name]
    spread += ["resnet_baseline", "resnet_no_decay", "resnet_fp16"]
    assert sorted(jobs) == sorted([*product(ROWS, "1"), *product(spread, "23")])


def sweep(folder: Path, top1: dict[str, list[float]]) -> Path:
    """Finished runs of rows, a seed for each accuracy in percent; and one that is not finished."""
    jobs = [(name, seed, one) for name, values in top1.items() for seed, one in enumerate(values, start=1)]
    for number, (name, seed, one) in enumerate(jobs):
        write_run(folder / str(number), replace(RUN, name=name, summary=replace(RUN.summary, top1=one / 100)))
        config = deepcopy(config_of(name)) | {"seed": seed}
        config["data"] |= {"path": "/somewhere/shards/cifar10"}
        (folder / str(number) / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    write_run(folder / str(len(jobs)), replace(RUN, name="alexnet_lars", status="interrupted"))
    return folder


def test_table_from_the_files_of_runs(tmp_path: Path) -> None:
    found = {
        "alexnet_baseline": [80.0, 81.0, 82.0],
        "alexnet_sgd": [70.0, 71.0, 72.0],
        "alexnet_bn5": [80.5, 81.0, 81.5],
        "alexnet_fp16": [78.0, 79.0, 80.0],
        "resnet_baseline": [85.0],
        "resnet_sgd": [84.5],
    }
    runs = tmp_path / "kept"
    assert keep(sweep(tmp_path / "sweep", found), runs) == 14
    kept = runs / "alexnet_sgd" / "seed2"
    assert sorted(path.name for path in kept.iterdir()) == ["config.yaml", "metrics.csv", "run.json"]
    assert OmegaConf.load(kept / "config.yaml").data.path == "cifar10"
    assert "somewhere" not in "".join(path.read_text() for path in kept.iterdir())
    curves = read_metrics(kept)
    assert curves["val/top1"].steps.tolist() == [9, 19, 29, 39]
    original = read_metrics(tmp_path / "sweep" / "0")
    assert curves["train/loss"].values[1] == pytest.approx(original["train/loss"].values[10:20].mean(), rel=1e-5)

    rows = read_rows(runs)
    assert {name: list(row.top1) for name, row in rows.items()} == {
        name: pytest.approx(values) for name, values in found.items()
    }
    assert (rows["alexnet_sgd"].batch, rows["resnet_sgd"].std) == (500, None)
    base = rows["alexnet_baseline"].rate
    assert rows["alexnet_sgd"].rate == pytest.approx(10 * base)
    lost = Comparison.of("alexnet_baseline", "alexnet_sgd", rows)
    assert (lost.difference, lost.spread) == (pytest.approx(-10), pytest.approx(2**0.5))
    text = report(rows)
    assert f"| large batch, SGD, linear scaling | 500 | 176 | {10 * base:g} | 71.00 ± 1.00 | 3 | -10.0 |" in text
    assert (
        "| a large batch costs SGD accuracy | alexnet_bn_small | seen on ResNet-50 | -10.0 (spread 1.4) | shows |"
        in text
    )
    # One seed borrows the median deviation of the others, 1.0.
    assert "| -0.5 (spread 1.4) | DOES NOT SHOW: within the spread (one seed) |" in text
    assert "-2.00 points from the small batch; MISSES the goal of at most 1.41 below" in text
    assert "FP16 is -2.00 points from FP32; MISSES" in text
    assert "- resnet_small: not run." in text


def test_verdicts() -> None:
    assert Comparison(0.3, 0.2).verdict("higher") == "shows"
    assert Comparison(-0.1, 0.2).verdict("higher") == "DOES NOT SHOW: within the spread"
    assert Comparison(-0.3, 0.2).verdict("higher") == "DOES NOT SHOW: the opposite"
    assert Comparison(-0.3, 0.2).verdict("lower") == "shows"
    assert Comparison(-0.1, 0.2).verdict("not lower") == "shows"
    assert Comparison(-0.3, 0.2).verdict("not lower") == "DOES NOT SHOW: lower"
    assert Comparison(-0.3, math.nan).verdict("not lower") == "not judged: one seed"
    assert Comparison(-0.3, 0.2, one_seed=True).verdict("lower") == "shows (one seed)"
    assert set(RECIPES_IN_FP32) == set(MODELS)
