"""From the composed config to the plain one that ranks get: values checked, the checkpoint found, the data there."""

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_fourmin.cli.spawn_ranks import Launch
from lightning_fourmin.cli.train_rank import make
from lightning_fourmin.data.datamodule import ShardDataModule
from lightning_fourmin.data.digits import DIGITS
from lightning_fourmin.data.index import INDEX_NAME
from lightning_fourmin.data.urls import is_url
from lightning_fourmin.errors import ConfigError, ShardError
from lightning_fourmin.models import SMALLEST_IMAGE
from lightning_fourmin.optim.schedule import GlobalBatch, Schedule
from lightning_fourmin.runs.folder import checkpoint_to_resume, say
from lightning_fourmin.runs.record import Summary

LAUNCHERS = ("torchrun", "slurm")
"""The options of the group `trainer` for ranks that a launcher starts."""


def resolve(config: DictConfig, folder: Path, launch: Launch) -> dict[str, Any]:
    """Plain values for the training that has its files in `folder`; errors name the key.

    Every rank of a launcher calls this for itself; a command calls it once and gives the result to its ranks.
    """
    # Messages show run_dir as it was typed; in a sweep the job has another folder.
    named = Path(str(config.run_dir))
    config.run_dir = str(folder)
    _fill_image_size(config)
    plain = _plain(config, launch)
    _check_recipe(plain["data"])
    _check_seed(plain["seed"])
    if not launch.is_external and plain["trainer"]["num_nodes"] != 1:
        raise ConfigError(
            f"trainer.num_nodes={plain['trainer']['num_nodes']}, but this command starts ranks on one machine: start "
            "it with torchrun or srun, as examples/torchrun.md and examples/slurm.sh do"
        )
    plain["trainer"]["accumulate_grad_batches"] = _num_accumulated(plain)
    checkpoint = checkpoint_to_resume(plain["resume"], named if named.absolute() == folder else folder)
    plain["resume"] = None if checkpoint is None else str(checkpoint)
    _check_metric(plain["metric"])
    _check_parts(plain)
    _check_data(plain["data"], validates=plain["trainer"].get("limit_val_batches") != 0)
    _check_image_size(plain)
    return plain


def _fill_image_size(config: DictConfig) -> None:
    """Takes the size of images from the index where none is given: nets are made for it as well."""
    if "image_size" not in config.data or config.data.image_size is not None:
        return
    # What is wrong with the data is said later, when all of the config has been looked at.
    with suppress(ShardError, OmegaConfBaseException):
        module = make("data", OmegaConf.to_container(config.data, resolve=True))
        if isinstance(module, ShardDataModule):
            config.data.image_size = module.image_size
            say(f"data.image_size={module.image_size}, from the index; augment={module.augment}")


def _check_image_size(config: dict[str, Any]) -> None:
    """Refuses images that are too small for a net of this package."""
    model, size = config["model"].get("model"), config["data"].get("image_size")
    least = SMALLEST_IMAGE.get(model) if isinstance(model, str) else None
    if least is not None and isinstance(size, int) and size < least:
        fitting = ", ".join(name for name, fits in SMALLEST_IMAGE.items() if size >= fits)
        raise ConfigError(
            f"data.image_size={size}, but model={model} takes images of {least} pixels or more: choose "
            + (f"another model ({fitting}) or a larger image_size" if fitting else "a larger image_size")
        )


def _plain(config: DictConfig, launch: Launch) -> dict[str, Any]:
    """The config as dictionaries and lists, every interpolation resolved and nothing missing."""
    try:
        missing = OmegaConf.missing_keys(config)
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        launcher = HydraConfig.get().runtime.choices.get("trainer")
        if launcher in LAUNCHERS and not launch.is_external and str(error.full_key).startswith("trainer."):
            raise ConfigError(
                f"{error.full_key}: trainer={launcher} takes it from the launcher; start the ranks with torchrun or "
                "srun, as examples/torchrun.md and examples/slurm.sh do"
            ) from error
        raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error
    if missing:
        raise ConfigError(f"{', '.join(sorted(missing))}: not given")
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_recipe(data: dict[str, Any]) -> None:
    """Refuses other data with the recipe of the demo, which is the default; experiment and data have one name there."""
    choices = HydraConfig.get().runtime.choices
    if choices.get("experiment") != DIGITS:
        return
    path = data.get("path", DIGITS)
    if choices.get("data") != DIGITS or path != DIGITS:
        given = f"data={choices['data']}" if choices.get("data") != DIGITS else f"data.path={path}"
        raise ConfigError(
            f"{given}, but image size, rate and length would be those of the demo, experiment={DIGITS}: "
            "choose another experiment, or experiment=none and set them yourself"
        )


def _check_seed(seed: Any) -> None:
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} must be a whole number from 0 to {2**32 - 1}")


def num_local_ranks(trainer: dict[str, Any]) -> int:
    """The number of ranks on this machine."""
    devices = trainer["devices"]
    if trainer["accelerator"] in ("gpu", "cuda"):
        try:
            return len(CUDAAccelerator.parse_devices(devices) or [])
        except MisconfigurationException as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"trainer.devices={devices}: {reason} Without GPUs use trainer=cpu2") from error
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"trainer.devices={devices} must be a number of ranks, 1 or more")
    return devices


def _num_accumulated(config: dict[str, Any]) -> int:
    """The number of backward passes a step, so that a step has `global_batch` samples."""
    trainer, wanted = config["trainer"], config["global_batch"]
    if wanted is None:
        return int(trainer["accumulate_grad_batches"])
    if "batch_size" not in config["data"]:
        raise ConfigError(f"global_batch={wanted} needs to know data.batch_size: set it, or global_batch=null")
    batch = GlobalBatch(config["data"]["batch_size"], num_local_ranks(trainer) * trainer["num_nodes"])
    if not isinstance(wanted, int) or wanted < batch.size or wanted % batch.size:
        raise ConfigError(
            f"global_batch={wanted} is not a multiple of the {batch} samples of one backward pass: change "
            "data.batch_size or trainer.devices, or set global_batch=null"
        )
    return int(wanted // batch.size)


def _check_metric(name: str) -> None:
    known = [field.name for field in fields(Summary)]
    if name not in known:
        raise ConfigError(f"metric={name} is not known: choose one of {', '.join(known)}")


def _check_parts(config: dict[str, Any]) -> None:
    """Makes what needs no rank, so that a mistake in a rate or an option of the strategy is said before ranks start."""
    for group in ("strategy", "precision"):
        make(group, config[group])
    make_optimizer, schedule = make("optim", config["optim"]), make("schedule", config["schedule"])
    try:
        optimizer = make_optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    except ValueError:
        raise
    except Exception:
        return  # an optimizer of the user's own that wants other parameters
    if isinstance(schedule, Schedule):
        schedule.plan(optimizer.param_groups[0]["lr"], GlobalBatch(1, 1), 1.0, 1)


def _check_data(data: dict[str, Any], validates: bool) -> None:
    """Reads the index before ranks do: what is missing is said sooner, and one process writes the demo data."""
    module = make("data", data)
    if not isinstance(module, ShardDataModule):
        return
    try:
        index = module.index
    except ShardError as error:
        if is_url(module.path) or (Path(module.path) / INDEX_NAME).exists():
            raise
        raise ShardError(
            f"{error}. From a folder of images with one folder a class: `fourmin pack src=FOLDER out={module.path} "
            "split=train`, then the same with split=val"
        ) from error
    for stage in ("train", "val") if validates else ("train",):
        index.split(module.splits[stage], module.path)
