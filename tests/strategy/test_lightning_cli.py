"""LightningCLI: what is not given arrives as None, and every part can be named in YAML."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_fourmin as fm

REPO = Path(__file__).parents[2]
COMMAND = [sys.executable, "examples/lightning_cli.py", "fit"]
CONFIG = ["--config", "examples/lightning_cli.yaml"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=REPO, timeout=200, check=False)


def test_none_stands_for_not_given() -> None:
    nothing = dict.fromkeys(("bucket_cap_mb", "bucket_cap_mb_list", "forward_sync_buffers", "gradient_as_bucket_view"))
    strategy = fm.FourMinStrategy(**nothing)
    assert not strategy._ddp_cuts
    assert not nothing.keys() & strategy._ddp_kwargs.keys()
    with pytest.raises(ValueError, match="fusion_mb and bucket_cap_mb both set the size of buckets"):
        fm.FourMinStrategy(fusion_mb=1, bucket_cap_mb=25)
    assert not fm.FourMinStrategy(fusion_mb=1, bucket_cap_mb=None)._ddp_cuts


def test_the_example_trains(tmp_path: Path) -> None:
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1"]
    ended = run(*CONFIG, *short, f"--trainer.default_root_dir={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks on 1 node, 1 group of 2; buckets: 1; wire: float16, rounded to fp16" in ended.stderr
    assert "Peak rate: 4, as given." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_flags_change_every_part() -> None:
    flags = {
        "--trainer.strategy.init_args.fusion_mb": "3",
        "--trainer.plugins.init_args.dtype": "bf16",
        "--model.optimizer.init_args.lr": "2.5",
        "--model.schedule.init_args.power": "3",
        "--data.batch_size": "16",
    }
    ended = run(*CONFIG, *(f"{flag}={value}" for flag, value in flags.items()), "--print_config")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    config = yaml.safe_load(ended.stdout)
    strategy = config["trainer"]["strategy"]["init_args"]
    assert (strategy["algorithm"], strategy["fusion_mb"]) == ("torus", 3.0)
    (precision,) = config["trainer"]["plugins"]
    assert precision["init_args"]["dtype"] == "bf16"
    assert config["model"]["optimizer"]["init_args"]["lr"] == 2.5
    assert config["model"]["schedule"]["init_args"]["power"] == 3.0
    assert config["data"]["batch_size"] == 16
