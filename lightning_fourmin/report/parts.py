"""The files that hold the curves of a run: one for each time it was started, the last of them `metrics.csv`.

A run that begins afresh in a folder that another has used sets the checkpoints of that one aside.
"""

import re
import shutil
from itertools import count
from pathlib import Path

METRICS_NAME = "metrics.csv"
CHECKPOINTS_NAME = "checkpoints"
SLURM_CHECKPOINTS = "hpc_ckpt_*.ckpt"
"""What Lightning goes on from by itself in a job of SLURM."""
RESUMED = "fourmin/resumed"
"""The column that says where a part goes on from a checkpoint; a part without it is a run of its own."""
_EARLIER = re.compile(r"metrics-(\d+)\.csv")


def metrics_files(folder: Path) -> list[Path]:
    """In the order in which they were written."""
    last = folder / METRICS_NAME
    return [*_earlier(folder).values(), *([last] if last.is_file() else [])]


def make_room(folder: Path, resumed: Path | None, slurm_goes_on: bool = False) -> None:
    """Sets the files in `folder` aside, since Lightning's logger begins with an empty one.

    A run that goes on from that of another folder takes the curves along from there. One that does not go on from this
    folder must not be taken for the one that has left checkpoints in it; what an earlier start of the same job of SLURM
    has left (`slurm_goes_on`) stays.
    """
    last = folder / METRICS_NAME
    if last.is_file():
        last.rename(_next(folder))
    if resumed is not None and resumed.resolve() == folder.resolve():
        return
    checkpoints = folder / CHECKPOINTS_NAME
    of_slurm = [] if slurm_goes_on else sorted(folder.glob(SLURM_CHECKPOINTS))
    if checkpoints.is_dir() or of_slurm:
        number = next(number for number in count(1) if not (folder / f"{CHECKPOINTS_NAME}-{number}").exists())
        aside = folder / f"{CHECKPOINTS_NAME}-{number}"
        if checkpoints.is_dir():
            checkpoints.rename(aside)
        aside.mkdir(exist_ok=True)
        for file in of_slurm:
            file.rename(aside / file.name)
    if resumed is not None:
        for file in metrics_files(resumed):
            shutil.copyfile(file, _next(folder))


def _earlier(folder: Path) -> dict[int, Path]:
    """By number, which rises."""
    found = {int(match[1]): path for path in folder.glob("metrics-*.csv") if (match := _EARLIER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _next(folder: Path) -> Path:
    return folder / f"metrics-{1 + max(_earlier(folder), default=0)}.csv"
