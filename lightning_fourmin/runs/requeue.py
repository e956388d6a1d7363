"""A training that SLURM has queued again goes on in its folder, whatever the command says of an earlier run."""

import os
from pathlib import Path

from lightning_fourmin.runs.resume import saved, say


def is_queued_again() -> bool:
    return bool(int(os.environ.get("SLURM_RESTART_COUNT", 0)))


def folder_to_go_on_in(folder: Path) -> str | None:
    """The run's own folder if an earlier start of this job has saved in it."""
    if not is_queued_again():
        return None
    if saved(folder):
        say("SLURM has queued this job again")
        return str(folder)
    say(f"SLURM has queued this job again: it begins afresh, {folder} has no checkpoint; give all starts one run_dir")
    return None
