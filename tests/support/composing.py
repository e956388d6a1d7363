"""Configs of `fourmin train` as the command line composes them, without running it."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.cli.spawn_ranks import Launch
from lightning_fourmin.cli.train_config import resolve


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


def resolved_config(folder: Path, *overrides: str) -> dict[str, Any]:
    """The config that the command gives to its ranks."""
    return resolve(composed(f"run_dir={folder}", *overrides), folder, Launch("user"))
