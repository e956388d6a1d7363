"""Keeps out of the terminal what torch and Lightning say and the user of `fourmin train` can do nothing about."""

import logging
import warnings

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


class _Dull(logging.Filter):
    """Drops the lines about hardware that is not there, and advertisements."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(word in text for word in ("available: ", "Tip: ", "`Trainer.fit` stopped"))


def hush() -> None:
    """For a process that trains."""
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_Dull())
