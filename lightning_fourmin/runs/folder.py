"""The files that hold the curves of a run: one for each time it was started, the last of them `metrics.csv`.

A run that begins afresh in a folder that another has used sets curves and checkpoints of that one aside.
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
    """Begins a file of curves in `folder`: Lightning's logger wants to find none.

    A run that goes on from that of another folder takes the curves along from there. One that does not go on from this
    folder must not be taken for the one that has left files in it, unless that is an earlier start of the same job of
    SLURM (`slurm_goes_on`).
    """
    last = folder / METRICS_NAME
    if last.is_file():
        last.rename(_next(folder))
    if resumed is not None and resumed.resolve() == folder.resolve():
        return
    if not slurm_goes_on:
        _set_aside([folder / CHECKPOINTS_NAME, *folder.glob(SLURM_CHECKPOINTS), *metrics_files(folder)])
    if resumed is not None:
        for file in metrics_files(resumed):
            shutil.copyfile(file, _next(folder))


def _set_aside(paths: list[Path]) -> None:
    found = [path for path in paths if path.exists()]
    if found:
        aside = next(aside for number in count(1) if not (aside := found[0].with_name(f"earlier-{number}")).exists())
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)


def _earlier(folder: Path) -> dict[int, Path]:
    """By number, which rises."""
    found = {int(match[1]): path for path in folder.glob("metrics-*.csv") if (match := _EARLIER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _next(folder: Path) -> Path:
    return folder / f"metrics-{1 + max(_earlier(folder), default=0)}.csv"
