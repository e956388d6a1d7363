"""One training as one rank sees it: data, module and Trainer from a resolved config."""

import logging
import signal
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_fourmin._lightning import SIGTERM_HANDLER, set_handler
from lightning_fourmin.callbacks.preemption import EXIT_CODE as PREEMPTED
from lightning_fourmin.callbacks.step_seed import StepSeed
from lightning_fourmin.cli.spawn_ranks import Launch, message_of
from lightning_fourmin.errors import ConfigError, FourMinError
from lightning_fourmin.optim.lars import LARS
from lightning_fourmin.runs.recorder import RunRecorder

PACKAGE = Path(__file__).parents[1]
_WARNINGS = (
    # Lightning builds torch's deprecated LeafSpec for every loader that is not in a collection.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # The run's folder has Hydra's files before the logger comes.
    r"Experiment logs directory .* exists and is not empty",
    r"Checkpoint directory .* exists and is not empty",
    # A first step in FP16 is skipped to find the loss scale; the schedule counts it, as it should.
    r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`",
    # The number of workers is part of the config, since the order of the data depends on it.
    r"The '.*' does not have many workers",
    # Epochs of demo data are short.
    r"The number of training batches .* is smaller than the logging interval",
    # Choosing the CPU on a machine with GPUs is a choice.
    r"GPU available but not used",
)
"""The warnings of torch and Lightning about which the user of `fourmin train` can do nothing."""


def train_rank(config: dict[str, Any], launch: Launch) -> None:
    """Trains as the rank that the environment names: in a process of its own, or in that of the launcher's rank.

    Raises KeyboardInterrupt after Ctrl-C, and SIGTERMException with the exit code 143 after SIGTERM, for which
    PreemptionCheckpoint saves first.
    """
    _filter_logs()
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
    if not launch.is_external and "preemption" not in callbacks:
        # Lightning's handler waits for the other ranks, which may never come; the command ends them all.
        callbacks["sigterm"] = LambdaCallback(
            setup=lambda trainer, *_, stage: set_handler(trainer, SIGTERM_HANDLER, _end_now)
        )
    make_trainer = make("trainer", config["trainer"], _partial_=True)
    trainer: Trainer = make_trainer(
        strategy=make("strategy", config["strategy"]),
        plugins=[make("precision", config["precision"])],
        callbacks=[*callbacks.values(), StepSeed(config["seed"]), RunRecorder(Path(config["run_dir"]))],
        logger=list(_parts("logger", config).values()),
        # Under a launcher, folders with the time in their names differ between ranks: only rank 0's is written to.
        default_root_dir=config["run_dir"],
        enable_progress_bar="progress_bar" in callbacks,
        enable_model_summary="model_summary" in callbacks,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks.values()),
    )
    try:
        trainer.fit(module, data, ckpt_path=config["resume"], weights_only=config["weights_only"])
    except SystemExit as end:
        # Lightning makes a SystemExit of Ctrl-C.
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if isinstance(end, SIGTERMException):
            # Lightning's own, where PreemptionCheckpoint is switched off, has no exit code.
            end.code = PREEMPTED
        raise


def _end_now(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _parts(group: str, config: dict[str, Any]) -> dict[str, Any]:
    """The members of a group that are not switched off with null."""
    parts = config.get(group) or {}
    return {name: make(f"{group}.{name}", part) for name, part in parts.items() if part}


def make(key: str, part: Any, **options: Any) -> Any:
    """The object that the config describes at `key`; errors of its class lose what Hydra puts around them."""
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


class _OursAndWarnings(logging.Filter):
    """Lets pass what this package says through Lightning's loggers, and every warning."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or PACKAGE in Path(record.pathname).parents


def _filter_logs() -> None:
    """Keeps the terminal of a process that trains free of what its user can do nothing about."""
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_OursAndWarnings())
