"""The Hydra tree: every config composes and makes what it says; every experiment trains."""

import os
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.cli.spawn_ranks import Launch
from lightning_fourmin.cli.train_rank import train_rank
from lightning_fourmin.data.index import ImageSizes, Index, Split
from lightning_fourmin.runs.record import RunRecord, hardware, versions
from tests.support.composing import composed, resolved_config
from tests.support.pool import RankPool
from tests.support.ranks import current_case
from tests.support.shards import jpeg, write_shard

GROUPS = ["model", "data", "optim", "schedule", "strategy", "precision", "trainer", "callbacks", "logger", "experiment"]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml") if path.stem != "none")
# These are what others of their group build on.
BASES = {("model", "classifier"), ("data", "shards"), ("trainer", "default")}
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if (path.parent.name, path.stem) not in BASES and path.parent.name in GROUPS
)
LAUNCHER = {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "3", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "3"}


def test_the_tree_has_all_groups_and_experiments() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"} >= set(GROUPS)
    assert EXPERIMENTS == [
        "cifar10_alexnet",
        "cifar10_resnet",
        "digits",
        "imagenet_alexnet_64k",
        "imagenet_resnet50_64k",
        "imagenet_resnet50_8k",
    ]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_config_composes(group: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    config = composed(f"{group}={option}")
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    assert plain["name"] == (option if group == "experiment" else "digits")
    if option in ("torchrun", "slurm"):
        assert (config.trainer.devices, config.trainer.num_nodes) == (4, 3)
    # Loggers that are not installed and the classes of data that is not here are other tests' matter.
    if group in ("optim", "schedule", "strategy", "precision", "callbacks"):
        parts = plain[group].values() if group == "callbacks" else [plain[group]]
        for part in parts:
            assert instantiate(part, _convert_="all") is not None


def test_no_experiment_leaves_the_groups_as_they_are() -> None:
    config = composed("experiment=none", "data=cifar10", "model=resnet_small")
    for group, option in (("optim", "lars"), ("schedule", "poly"), ("data", "cifar10")):
        own = OmegaConf.load(CONF / group / f"{option}.yaml")
        assert isinstance(own, DictConfig)
        for key in own.keys() - {"defaults"}:
            assert OmegaConf.to_container(config[group])[key] == OmegaConf.to_container(own)[key]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_begin_with_command_result_and_hardware(name: str) -> None:
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == ("# fourmin train" if name == "digits" else f"# fourmin train experiment={name}")
    assert lines[2].startswith("# Expected: ")
    header = "\n".join(line for line in lines if line.startswith("#"))
    assert any(tag in header for tag in ("[abs]", "[code]", "[measured here]", "[unmeasured]"))
    assert "# Hardware: " in header


def test_imagenet_experiments_are_the_published_recipes() -> None:
    """ResNet-50: MLPerf's convergence points; AlexNet: what LARS's author used, in epochs."""
    for name, batch, rate, warmup, momentum, decay in (
        ("imagenet_resnet50_8k", 8192, 17.0, 5, 0.9, 2e-4),
        ("imagenet_resnet50_64k", 65536, 24.699, 31, 0.951807, 1e-4),
    ):
        config = composed(f"experiment={name}")
        optim, schedule = config.optim, config.schedule
        assert (config.global_batch, optim.lr, schedule.warmup_epochs) == (batch, rate, warmup)
        assert (optim.momentum, optim.weight_decay, optim.trust_coefficient) == (momentum, decay, 0.001)
        assert (schedule.end_lr, schedule.power, schedule.base_batch) == (1e-4, 2, None)
    config = composed("experiment=imagenet_alexnet_64k")
    assert (config.global_batch, config.trainer.max_epochs, config.optim.weight_decay) == (65536, 95, 5e-4)
    assert config.model.model_options == {"image_size": 227, "bn5": True, "dropout": 0.5}
    assert config.data.batch_size * 1024 == config.global_batch
    assert composed("experiment=imagenet_resnet50_64k").data.batch_size * 2048 == 65536


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight images a split of three classes, 40 x 36 pixels."""
    folder = tmp_path_factory.mktemp("stand_in")
    samples = [{"__key__": f"{n:03d}", "jpg": jpeg(40, 36, n), "cls": n % 3} for n in range(8)]
    splits = {
        name: Split((write_shard(folder / f"{name}-000000.tar", samples),), ImageSizes.of([(40, 36)] * 8))
        for name in ("train", "val")
    }
    Index(("cat", "dog", "eel"), splits).write(folder)
    return str(folder)


def train_here(folder: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A rank of the pool as a rank of `fourmin train`; gives what rank 0 has recorded."""
    os.environ["LOCAL_RANK"] = str(current_case().rank)
    config = resolved_config(folder, f"trainer.devices={current_case().world}", *overrides)
    train_rank(config, Launch("user"))
    record = RunRecord.read(folder)
    assert record.model is not None
    return {"summary": record.summary, "world_size": record.world_size, "arithmetic": record.arithmetic}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_trains(name: str, stand_in: str, ranks: RankPool, tmp_path: Path) -> None:
    RunRecord(name, "test", "now", versions(), hardware()).write(tmp_path)
    # The nets and the recipe are the experiment's own; images and batch are as small as they can be.
    overrides = [f"experiment={name}", "trainer=cpu2", "trainer.fast_dev_run=true", "data.num_workers=0"]
    if name != "digits":
        size = {"imagenet_alexnet_64k": 67}.get(name, 32)
        overrides += [f"data.path={stand_in}", "data.batch_size=2", f"data.image_size={size}"]
    if name.startswith("imagenet"):
        overrides.append("global_batch=8")
    results = ranks.run(train_here, tmp_path, tuple(overrides), world=2, timeout=120)
    assert results[0]["world_size"] == 2
    assert results[0]["summary"].steps == 1
    assert 0 <= results[0]["summary"].top1 <= 1
    if name.startswith("imagenet"):
        assert results[0]["arithmetic"][0] == "Global batch: 2 a rank x 2 ranks x 2 accumulated = 8."
