"""Keeps out of the terminal what torch and Lightning say and the user of `fourmin train` can do nothing about."""

import logging
import warnings
from pathlib import Path

from typing_extensions import override

PACKAGE = Path(__file__).parents[1]

_WARNINGS = (
    # Lightning builds torch's deprecated LeafSpec for every loader that is not in a collection.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # The run's folder has Hydra's files before the logger comes.
    r"Experiment logs directory .* exists and is not empty",
    r"Checkpoint directory .* exists and is not empty",
    # A first step in FP16 that is skipped to find the loss scale: the schedule goes on, as it should.
    r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`",
    # The number of workers is part of the config, since the order of the data depends on it.
    r"The '.*' does not have many workers",
    # Epochs of demo data are short.
    r"The number of training batches .* is smaller than the logging interval",
    # Choosing the CPU on a machine with GPUs is a choice.
    r"GPU available but not used",
)


class _Ours(logging.Filter):
    """Of what Lightning's loggers are told, passes what this package says, and warnings."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or PACKAGE in Path(record.pathname).parents


def hush() -> None:
    """For a process that trains."""
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_Ours())
