"""The folder of a run: its curves, its checkpoints, and the rule by which a training resumes.

    runs/digits/2026-11-16_11-16-45/
        run.json  config.yaml  report.html  error.txt
        checkpoints/best.ckpt  checkpoints/last.ckpt
        hpc_ckpt_1.ckpt       a checkpoint where Lightning looks for it in a job of SLURM
        metrics.csv           the curves since the last start of the command
        metrics-1.csv         the curves of the starts before it, with rising numbers
        earlier-1/            curves and checkpoints of a run, set aside by one that began afresh in its folder

The rule: a folder with checkpoints resumes from the newest whole one, a folder without begins; `resume=DIR` or
`resume=FILE` names the run or the checkpoint that a folder without its own resumes from; `resume=false` begins afresh.
So the same command may be given any number of times, by a person after Ctrl-C, a sweep, SLURM or torchrun. A run that
resumes has the settings of the run that it resumes, and the arguments of its own command come on top of them.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.distributed_c10d import default_pg_timeout

from lightning_fourmin.callbacks.preemption import FILE_NAME as LAST_NAME
from lightning_fourmin.errors import CheckpointError, ConfigError, RunError
from lightning_fourmin.faults.checkpoint_io import check_checkpoint
from lightning_fourmin.faults.restart_store import shares_agents_store, store_of_attempt
from lightning_fourmin.runs.record import RUN_NAME, RunRecord

METRICS_NAME = "metrics.csv"
CHECKPOINTS_NAME = "checkpoints"
SLURM_CHECKPOINTS = "hpc_ckpt_*.ckpt"
"""The checkpoints that Lightning writes, and looks for, in a job of SLURM."""
RESUMED = "fourmin/resumed"
"""The column that has one value, at the step from which a start has resumed; it is missing where a run has begun."""
STORE_KEY = "fourmin/run"
"""The key of torchrun's store under which rank 0 leaves the folder of the run."""
_EARLIER = re.compile(r"metrics-(\d+)\.csv")


def checkpoint_to_resume(resume: bool | str | int | None, folder: Path) -> Path | None:
    """The checkpoint that a training in `folder` resumes from by the rule above, or None if it begins.

    Where torchrun or srun has started the ranks, each of them calls this and must find the same. Nothing that rank 0
    does to the folder before all ranks train changes the answer: it only sets aside what no rank resumes from.

    Args:
        resume: the option of the command. True names the newest run beside `folder`, which suits scripts.
        folder: the folder of the run, which may not exist.
    """
    own = saved(folder)
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        # SLURM queues a job again after it has warned it, or because a node has failed.
        hint = "" if own else f": it begins afresh, {folder} has no checkpoint; give all starts one run_dir"
        say(f"SLURM has queued this job again{hint}")
        if own:
            resume = None  # The option was meant for the first start.
    if resume is False or not (candidates := _candidates(resume, folder, own)):
        return None
    afresh = "" if candidates is not own else " (resume=false begins afresh)"
    try:
        checkpoint = first_whole(candidates)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{afresh}") from error
    say(f"goes on from {checkpoint}{afresh}")
    return checkpoint


def _candidates(resume: bool | str | int | None, folder: Path, own: list[Path]) -> list[Path]:
    """The checkpoints to try, in this order; `own` are those of the folder."""
    if resume is None:
        return own
    if resume is True:
        if found := own or _of_newest_runs(folder.parent):
            return found
        raise ConfigError(f"resume=true, but no run in {folder.parent} has a checkpoint: train without resume first")
    path = Path(str(resume))  # A job of a sweep has a number as its folder's name, which Hydra reads as one.
    if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
        return [path]
    if own:
        if path.resolve() != folder.resolve():
            say(f"{folder} has checkpoints of its own: resume={resume} counts where it has none")
        return own
    found = saved(path) if path.is_dir() else [path]
    if not found or not found[0].is_file():
        missing = f"{path}/{CHECKPOINTS_NAME} is empty" if path.is_dir() else f"{path} does not exist"
        raise ConfigError(f"resume={resume}: {missing}; give the folder of a run, or true for the newest")
    return found


def saved(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    files = [*(run / CHECKPOINTS_NAME).glob("*.ckpt"), *run.glob(SLURM_CHECKPOINTS)]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name == LAST_NAME), reverse=True)


def _of_newest_runs(experiment: Path) -> list[Path]:
    """The checkpoints of all runs in a folder, those of the newest run first."""
    runs = [files for run in experiment.glob("*/") if (files := saved(run))]
    runs.sort(key=lambda files: files[0].stat().st_mtime_ns, reverse=True)
    return [path for files in runs for path in files]


def first_whole(checkpoints: list[Path]) -> Path:
    """The first checkpoint that can be loaded. Those before it are named on stderr; CheckpointError if there is none.

    `checkpoints` has at least one.
    """
    for path in checkpoints[:-1]:
        try:
            check_checkpoint(path)
            return path
        except CheckpointError as error:
            say(f"{error}; the one before it is tried")
    check_checkpoint(checkpoints[-1])
    return checkpoints[-1]


def with_settings_of_run(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with those of the run that `resume` or `run_dir` names in front of them.

    Left out are those that the command gives itself. A sweep resumes job by job and says its settings anew. Where
    torchrun or srun has started the ranks, each calls this: rank 0 may have rewritten the record, but then with what it
    has got here.
    """
    if {"-m", "--multirun"} & set(arguments):
        return list(arguments)
    try:
        given = _parsed(arguments)
        run = _named_run(given)
        record = None if run is None else RunRecord.read(run)
    except (HydraException, RunError):
        return list(arguments)  # Whoever needs them says what is wrong.
    if record is None:
        return list(arguments)
    # Version 0.1 has recorded the command, or the settings of a job.
    of_run = record.arguments or record.overrides or shlex.split(record.command)[2:]
    own = {"run_dir", "resume", *given}
    taken = [one.input_line for key, one in _parsed(of_run).items() if key not in own and not key.startswith("hydra.")]
    return [*map(str, taken), *arguments]


def _parsed(arguments: Sequence[str]) -> dict[str, Override]:
    """The arguments that are overrides, by their keys."""
    overrides = [text for text in arguments if not text.startswith("-")]
    return {one.key_or_group: one for one in OverridesParser.create().parse_overrides(overrides)}


def _named_run(given: Mapping[str, Override]) -> Path | None:
    """The folder of the run that will be resumed, as far as the arguments name it."""
    resume, run_dir = (given[key].value() if key in given else None for key in ("resume", "run_dir"))
    if resume is False:
        return None
    if run_dir is not None and saved(Path(str(run_dir))):
        run: Path | None = Path(str(run_dir))
    elif resume in (None, True):
        return None
    else:
        run = Path(str(resume)) if Path(str(resume)).is_dir() else run_of(str(resume))
    return run if run is not None and (run / RUN_NAME).is_file() else None


def settings_that_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two resolved configs have different, but for where their files are, each as `key=value (was value)`."""
    old, new = _flat(before), _flat(now)
    folders = str(before.get("run_dir")), str(now.get("run_dir"))
    moved = {key: value.replace(*folders) if isinstance(value, str) else value for key, value in old.items()}
    keys = [key for key in {**new, **old} if key not in ("run_dir", "resume") and moved.get(key) != new.get(key)]
    return [f"{key}={new.get(key, 'not set')} (was {old.get(key, 'not set')})" for key in keys]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested config by their whole keys."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def run_of(checkpoint: str | None) -> Path | None:
    """The folder of the run that has saved a checkpoint, if it is a run of this command."""
    folders = () if checkpoint is None else Path(checkpoint).absolute().parents[:2]
    return next((folder for folder in folders if (folder / RUN_NAME).is_file()), None)


@rank_zero_only
def say(text: str) -> None:
    """Prints a line on rank 0 beside what the training prints."""
    print(f"fourmin train: {text}", file=sys.stderr, flush=True)


def override(key: str, path: Path | str) -> str:
    """`key=path` for Hydra's command line, to which commas and the like mean something."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return f"{key}={text}"
    escaped = text.replace("'", r"\'")
    return f"{key}='{escaped}'"


# The files of a run that begins or resumes. Only the command, or rank 0 of a launcher, calls what follows.


def metrics_files(folder: Path) -> list[Path]:
    """The files with curves in the order in which they were written."""
    last = folder / METRICS_NAME
    return [*_earlier(folder).values(), *([last] if last.is_file() else [])]


def make_room(folder: Path, resumed: Path | None) -> None:
    """Prepares `folder` for a start that resumes from the run in the folder `resumed`, or that begins if it is None.

    Lightning's logger wants to find no file of curves. A run that resumes from another folder copies the curves
    that it finds there. A run that does not resume from its own folder sets aside what another run has left in it, so
    that nobody takes the files of one for those of the other.
    """
    last = folder / METRICS_NAME
    if last.is_file():
        last.rename(_next(folder))
    if resumed is not None and resumed.resolve() == folder.resolve():
        return
    if found := [*folder.glob(CHECKPOINTS_NAME), *folder.glob(SLURM_CHECKPOINTS), *metrics_files(folder)]:
        aside = next(aside for number in count(1) if not (aside := folder / f"earlier-{number}").exists())
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
    if resumed is not None:
        for file in metrics_files(resumed):
            shutil.copyfile(file, _next(folder))


def _earlier(folder: Path) -> dict[int, Path]:
    """The files of the starts before the last by their numbers, which rise."""
    found = {int(match[1]): path for path in folder.glob("metrics-*.csv") if (match := _EARLIER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _next(folder: Path) -> Path:
    """The name for the curves of one more start."""
    return folder / f"metrics-{1 + max(_earlier(folder), default=0)}.csv"


# Restarts by torchrun: the default folder has the time of the start in its name, so that the ranks of another attempt
# would begin in another folder. The agents keep one store for all attempts; rank 0 of each attempt leaves its folder
# there. It also decides for all ranks of the next attempt, since agents of several nodes count restarts differently.


def overrides_of_restart() -> list[str]:
    """The arguments that every rank adds to its command line, which are none in a job's first attempt.

    A collective call: rank 0 decides, and the others wait for its answer in the store of the attempt.
    """
    if not shares_agents_store():
        return []
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = store_of_attempt(address, port, rank, num_ranks, default_pg_timeout)
    if rank == 0:
        attempt.set("overrides", json.dumps(overrides_after(_agents_store())))
    overrides: list[str] = json.loads(attempt.get("overrides"))
    return overrides


def overrides_after(store: dist.Store) -> list[str]:
    """The arguments with which the run of earlier attempts resumes; called by rank 0 alone."""
    if not store.check([STORE_KEY]):
        return []
    folder = Path(store.get(STORE_KEY).decode())
    try:
        checkpoint = first_whole(own) if (own := saved(folder)) else None
    except CheckpointError as error:
        say(str(error))
        make_room(folder, None)
        checkpoint = None
    afresh = ": there is nothing to go on from, it begins afresh" if checkpoint is None else ""
    say(f"torchrun has started this job again{afresh}")
    # The checkpoint is named, so that no rank looks for itself, whatever `resume` the first attempt was given.
    resumed = [] if checkpoint is None else [override("resume", checkpoint)]
    return [override("run_dir", folder), *resumed]


def remember_folder(folder: Path) -> None:
    """Leaves the folder for later attempts; rank 0 calls it after `make_room`, which sets files of other runs aside."""
    if shares_agents_store():
        _agents_store().set(STORE_KEY, str(folder.absolute()))


def _agents_store() -> dist.Store:
    """The store that torchrun's agents keep for all attempts."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
