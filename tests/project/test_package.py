"""Wheel and sdist hold what they should, and the wheel works from an empty directory."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.versions import TESTS

REPO = Path(__file__).parents[2]

USE_PACKAGE = """
import lightning_fourmin
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

assert "fourmin" in StrategyRegistry.available_strategies()
trainer = Trainer(strategy="fourmin", accelerator="cpu", devices=1, barebones=True)
assert isinstance(trainer.strategy, lightning_fourmin.FourMinStrategy), trainer.strategy
print("imported from", lightning_fourmin.__file__)

# Other people's Hydra apps find the tree.
from hydra import compose, initialize_config_dir
import os
with initialize_config_dir(os.getcwd(), version_base="1.3"):
    config = compose("app", ["optim=sgd"])
assert config.optim._target_ == "torch.optim.SGD", config
assert config.strategy._target_ == "lightning_fourmin.FourMinStrategy", config
"""

APP = """
defaults: [{strategy: fourmin}, {optim: lars}]
hydra: {searchpath: ["pkg://lightning_fourmin.conf"]}
"""


def python(*arguments: str | Path, cwd: Path = REPO, **env: str) -> str:
    """What `python *arguments` prints, whatever the caller's PYTHON* settings, user site and `cwd`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-s", "-P", *arguments],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"python {arguments} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def test_wheel_holds_the_package_and_its_configs_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_fourmin"}
    assert {"lightning_fourmin/conf/strategy/fourmin.yaml", "lightning_fourmin/report/templates/run.html"} <= set(names)
    # It stands for the tree where that is beside the package.
    assert "lightning_fourmin/conf.py" not in names


def test_wheel_registers_the_strategy_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    python("-m", "pip", "install", "--no-index", "--no-deps", "--target", site, wheel)
    assert (site / "lightning_fourmin/conf/strategy/fourmin.yaml").is_file()
    (elsewhere / "app.yaml").write_text(APP)
    output = python("-c", USE_PACKAGE, cwd=elsewhere, PYTHONPATH=str(site))
    assert f"imported from {site / 'lightning_fourmin' / '__init__.py'}" in output


def test_sdist_holds_the_sources_and_nothing_that_lies_about(tmp_path: Path) -> None:
    python("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {"benchmarks", "conf", "docs", "examples", "lightning_fourmin", "tests"}
    assert {name.partition("/")[0] for name in names if "/" in name} == folders
    assert {
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints.txt",
        "lightning_fourmin/conf.py",
        "lightning_fourmin/py.typed",
        "lightning_fourmin/report/templates/run.html",
        "mkdocs.yml",
        "pyproject.toml",
        "tests/scripts/train.py",
    } <= names
    assert not [name for name in names if name.endswith((".ckpt", ".pyc", ".tar"))]


def test_tests_of_other_versions_are_there() -> None:
    assert [name for name in TESTS if not (REPO / "tests" / name).is_file()] == []
