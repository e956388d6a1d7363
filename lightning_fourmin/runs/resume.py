"""Which checkpoint a run goes on from: the newest that is whole."""

import re
import sys
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fourmin.callbacks.preemption import FILE_NAME as LAST_NAME
from lightning_fourmin.errors import CheckpointError
from lightning_fourmin.faults.checkpoint_io import check_checkpoint
from lightning_fourmin.runs.folder import CHECKPOINTS_NAME
from lightning_fourmin.runs.record import RUN_NAME


def saved(run: Path) -> list[Path]:
    """The checkpoints of a run: the last one, then the others, newest first."""
    files = (run / CHECKPOINTS_NAME).glob("*.ckpt")
    return sorted(files, key=lambda path: (path.name == LAST_NAME, path.stat().st_mtime), reverse=True)


def newest_runs_first(experiment: Path) -> list[Path]:
    """The checkpoints of all runs in a folder."""
    runs = [files for run in experiment.glob("*/") if (files := saved(run))]
    runs.sort(key=lambda files: max(path.stat().st_mtime for path in files), reverse=True)
    return [path for files in runs for path in files]


def first_whole(checkpoints: list[Path]) -> Path:
    """The first that can be loaded; says which ones it passes over. CheckpointError if there is none."""
    for path in checkpoints[:-1]:
        try:
            check_checkpoint(path)
            return path
        except CheckpointError as error:
            say(f"{error}; the one before it is tried")
    check_checkpoint(checkpoints[-1])
    return checkpoints[-1]


def override(key: str, path: Path | str) -> str:
    """For Hydra, to which commas and the like mean something."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return f"{key}={text}"
    escaped = text.replace("'", r"\'")
    return f"{key}='{escaped}'"


@rank_zero_only
def say(text: str) -> None:
    """On rank 0, beside what the training prints."""
    print(f"fourmin train: {text}", file=sys.stderr, flush=True)


def run_of(checkpoint: str | None) -> Path | None:
    """The folder of the run that has saved a checkpoint, if it is a run of this command."""
    folders = () if checkpoint is None else Path(checkpoint).absolute().parents[:2]
    return next((folder for folder in folders if (folder / RUN_NAME).is_file()), None)
