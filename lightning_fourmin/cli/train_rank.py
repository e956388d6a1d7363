"""One training as one rank sees it: data, module and Trainer from a resolved config."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_fourmin._lightning import SIGTERM_HANDLER, set_handler
from lightning_fourmin.callbacks.preemption import EXIT_CODE as PREEMPTED
from lightning_fourmin.cli.log_filters import hush
from lightning_fourmin.cli.spawn_ranks import message_of
from lightning_fourmin.cli.step_seed import StepSeed
from lightning_fourmin.errors import ConfigError, FourMinError
from lightning_fourmin.optim.lars import LARS
from lightning_fourmin.runs.recorder import RunRecorder


def train(config: dict[str, Any]) -> None:
    """Trains; the rank is what the environment says. Rank 0 keeps `run.json` up to date."""
    hush()
    seed_everything(config["seed"], workers=True, verbose=False)
    data: LightningDataModule = make("data", config["data"])
    optimizer = make("optim", config["optim"])
    schedule = make("schedule", config["schedule"])
    # A data module of the user's own, or an index without classes, leaves it to the model's config.
    num_classes = getattr(data, "num_classes", 0)
    classes = {"num_classes": num_classes} if num_classes else {}
    make_module = make("model", config["model"], _partial_=True)
    module: LightningModule = make_module(optimizer=optimizer, schedule=schedule, **classes)
    callbacks = _parts("callbacks", config)
    if optimizer.func is not LARS:
        callbacks.pop("trust_ratios", None)
    if external_rank() is None and "preemption" not in callbacks:
        # Lightning's handler waits for the other ranks, which may never come.
        callbacks["sigterm"] = LambdaCallback(
            setup=lambda trainer, *_, stage: set_handler(trainer, SIGTERM_HANDLER, _end)
        )
    make_trainer = make("trainer", config["trainer"], _partial_=True)
    trainer: Trainer = make_trainer(
        strategy=make("strategy", config["strategy"]),
        plugins=[make("precision", config["precision"])],
        callbacks=[*callbacks.values(), StepSeed(config["seed"]), RunRecorder(Path(config["run_dir"]))],
        logger=list(_parts("logger", config).values()),
        default_root_dir=config["run_dir"],
        enable_progress_bar="progress_bar" in callbacks,
        enable_model_summary="model_summary" in callbacks,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks.values()),
    )
    try:
        trainer.fit(module, data, ckpt_path=config["resume"] or None, weights_only=config["weights_only"])
    except SystemExit as end:
        # What Lightning makes of Ctrl-C.
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(end, SIGTERMException):
            # Lightning's own, where PreemptionCheckpoint is switched off, has no exit code.
            end.code = PREEMPTED
        raise


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _parts(group: str, config: dict[str, Any]) -> dict[str, Any]:
    """The members of a group that are not switched off with null."""
    parts = config.get(group) or {}
    return {name: make(f"{group}.{name}", part) for name, part in parts.items() if part}


def make(key: str, part: Any, **options: Any) -> Any:
    """The object that the config describes at `key`; an error of its class is said without what Hydra adds."""
    try:
        return instantiate(part, _convert_="all", **options)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        # Our own errors, and ValueErrors of constructors, name the field.
        if isinstance(cause, ValueError | FourMinError):
            raise cause from error
        raise ConfigError(f"{key}: {message_of(cause)}") from error


def external_rank() -> int | None:
    """The rank that torchrun or srun has started this process as; None: nobody has."""
    if TorchElasticEnvironment.detect():
        return int(os.environ["RANK"])
    # A batch script, and the shell that salloc opens, are no tasks of srun: they are in none of its steps.
    in_step = "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect()
    return int(os.environ["SLURM_PROCID"]) if in_step else None
