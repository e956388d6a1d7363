"""`fourmin train`: composes a training, runs its ranks, and leaves a folder with its record and report.

Who does what, and who writes `run.json` and when:

    the command    Hydra composes the config, of each job of a sweep in turn; then a job is resolved once. The command
                   writes the record, starts the ranks, waits for them, writes how it ended, and draws the page.
    ranks 0, 1 ..  train, in processes that the command has started. Rank 0 alone updates the record in between.

Under torchrun or srun there is no command above the ranks: each composes and resolves the config for itself, and rank 0
does what the command does, the training included. At no time are there two writers: the command writes before the
ranks have started and after they have ended, and holds a lock on the folder all the while, so that no other run begins
in it.

Ctrl-C ends the ranks and leaves a record that says `interrupted`; SIGTERM is passed on to the ranks, which save a
checkpoint and end, and leaves `preempted`. Both records are written by the command.
"""

import fcntl
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_fourmin.callbacks.preemption import EXIT_CODE as PREEMPTED
from lightning_fourmin.cli import INTERRUPTED
from lightning_fourmin.cli.hydra_app import give_up, run_hydra
from lightning_fourmin.cli.output import outcome_lines
from lightning_fourmin.cli.spawn_ranks import Launch, message_of, run_ranks
from lightning_fourmin.cli.train_config import num_local_ranks, resolve
from lightning_fourmin.cli.train_rank import train_rank
from lightning_fourmin.errors import RankError, RunError
from lightning_fourmin.report.run_page import write_report
from lightning_fourmin.runs.folder import (
    make_room,
    overrides_of_restart,
    remember_folder,
    run_of,
    say,
    settings_that_differ,
    with_settings_of_run,
)
from lightning_fourmin.runs.record import ERROR_NAME, RUN_NAME, RunRecord, Status, hardware, versions

EXIT_CODES = {"failed": 1, "interrupted": INTERRUPTED, "preempted": PREEMPTED}


def main() -> None:
    """Runs the verb: one training, or with -m a sweep of them."""
    launch = Launch.detect()
    if launch.is_external and {"-m", "--multirun"} & set(sys.argv):
        give_up("train", "a sweep starts the ranks of each job itself: run it without torchrun or srun")
    if launch.rank > 0:
        # Hydra must make no folder: that of the run is rank 0's.
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
    sys.argv += overrides_of_restart()
    typed = sys.argv[1:]
    sys.argv[1:] = with_settings_of_run(typed)
    run_hydra("train", lambda config: _follow(config, launch) if launch.rank > 0 else _lead(config, launch, typed))


def _follow(config: DictConfig, launch: Launch) -> None:
    """A rank above 0 of a launcher: trains, and leaves folder and record to rank 0."""
    try:
        train_rank(resolve(config, Path(config.run_dir).absolute(), launch), launch)
    except Exception as error:
        give_up("train", f"rank {launch.rank}: {message_of(error)}")


def _lead(config: DictConfig, launch: Launch, typed: list[str]) -> float:
    """One training, as the command or as rank 0 of a launcher; gives its metric to sweepers, NaN if it failed."""
    hydra = HydraConfig.get()
    folder, sweeping = Path(hydra.runtime.output_dir), hydra.mode == RunMode.MULTIRUN
    if not config.name:
        give_up("train", "name is not given: write experiment=none instead of ~experiment, or name=NAME")
    overrides: tuple[str, ...] = ()
    record = None
    if sweeping:
        if folder.name != str(hydra.job.num):
            give_up("train", "hydra.sweep.subdir must be ${hydra.job.num}: reports and resumed sweeps find jobs by it")
        # Whether a job resumes is no setting that jobs differ in; which checkpoint it begins from is one.
        no_settings = ("resume=true", "resume=false", "resume=null")
        overrides = tuple(text for text in hydra.overrides.task if text.lower() not in no_settings)
        print(f"\njob {hydra.job.num}: {' '.join(overrides)}", flush=True)
        record = _done_before(config, folder, overrides)
    if record is None:
        with _alone_in(folder):
            record = _run(config, folder, overrides, launch, typed)
    ok = record.status == "done"
    print("\n".join(outcome_lines(record, folder)), file=sys.stdout if ok else sys.stderr, flush=True)
    if not ok and not (record.status == "failed" and sweeping):
        sys.exit(EXIT_CODES[record.status])
    # An unknown metric is among the reasons to fail.
    value = getattr(record.summary, config.metric) if ok else None
    return math.nan if value is None else float(value)


def _done_before(config: DictConfig, folder: Path, overrides: tuple[str, ...]) -> RunRecord | None:
    """The record of a job that an earlier start of the sweep has finished; None: the job resumes or begins.

    Ends the command if the folder holds a job with other settings: two sweeps in one folder would be taken for one.
    """
    if config.resume is True:
        # The newest run beside this job is another job.
        config.resume = None
        if folder.name == "0" and not (folder / RUN_NAME).is_file():  # jobs run in order, so there was none
            say(f"{folder.parent} has no jobs to go on with: the sweep begins (hydra.sweep.dir names an earlier one)")
    if not (folder / RUN_NAME).is_file():
        return None
    try:
        record = RunRecord.read(folder)
    except RunError as error:
        give_up("train", str(error))
    if record.overrides != overrides:
        its = " ".join(record.overrides)
        give_up("train", f"{folder} holds the job `{its}`: give the sweep another hydra.sweep.dir")
    return record if record.status == "done" and config.resume is not False else None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Ends the command if another process writes to the folder, as when two were started within a second."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                give_up("train", f"another run writes to {folder}: give this one a run_dir of its own")
        yield
    finally:
        os.close(directory)


def _run(config: DictConfig, folder: Path, overrides: tuple[str, ...], launch: Launch, typed: list[str]) -> RunRecord:
    """Trains and gives the record of how that ended, which is in the folder with everything else."""
    start_s = time.monotonic()
    earlier = _record_of(folder)
    seconds_before = _seconds(earlier)
    started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
    command = shlex.join(["fourmin", "train", *typed])
    arguments = tuple(HydraConfig.get().overrides.task)
    fresh = RunRecord(
        _title(config), command, started, versions(), hardware(), overrides=overrides, arguments=arguments
    )
    # What cannot begin leaves the figures and the time of the run that the folder holds.
    if earlier is None:
        fresh.write(folder)
    status: Status = "done"
    error = None
    (folder / ERROR_NAME).unlink(missing_ok=True)
    try:
        plain = resolve(config, folder, launch)
        resumed = run_of(plain["resume"])
        if resumed is not None:
            _say_what_differs(resumed, plain)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(plain))
        before = None if resumed is None else earlier if resumed.samefile(folder) else _record_of(resumed)
        seconds_before = _seconds(before)
        # With the time of the parts before this one: a part that is killed leaves what they took.
        _with_figures_of(before, fresh).write(folder)
        make_room(folder, resumed)
        remember_folder(folder)
        if launch.is_external:
            train_rank(plain, launch)
        else:
            run_ranks(partial(train_rank, launch=launch), plain, num_local_ranks(plain["trainer"]))
    except KeyboardInterrupt:
        status = "interrupted"
    except SIGTERMException:
        status = "preempted"
    except Exception as failure:
        status, error = "failed", message_of(failure)
        details = failure.details if isinstance(failure, RankError) else traceback.format_exc()
        if details:
            (folder / ERROR_NAME).write_text(details)
    seconds = round(seconds_before + time.monotonic() - start_s, 1)
    # Read anew: rank 0 has added what it found.
    record = replace(RunRecord.read(folder), seconds=seconds, status=status, error=error)
    record.write(folder)
    try:
        write_report(folder)
    except Exception as failure:
        # A page that cannot be drawn does not undo a training.
        print(f"fourmin train: no report: {message_of(failure)}", file=sys.stderr)
    return record


def _title(config: DictConfig) -> str:
    """The name of the experiment; of a run without a recipe that of its data."""
    with suppress(OmegaConfBaseException):
        if config.name == "none" and "path" in config.data:
            return Path(str(config.data.path).rstrip("/")).name or str(config.name)
    return str(config.name)


def _say_what_differs(resumed: Path, plain: dict[str, Any]) -> None:
    config = resumed / "config.yaml"
    if config.is_file():
        before = OmegaConf.to_container(OmegaConf.load(config))
        assert isinstance(before, dict)
        if changes := settings_that_differ({str(key): value for key, value in before.items()}, plain):
            say(f"has the settings of {os.path.relpath(resumed)}, but for {', '.join(changes)}")


def _record_of(run: Path) -> RunRecord | None:
    with suppress(RunError):
        return RunRecord.read(run)
    return None


def _seconds(record: RunRecord | None) -> float:
    """The time that a run has taken up to now; 0 where nobody knows."""
    return 0.0 if record is None or record.seconds is None else record.seconds


def _with_figures_of(before: RunRecord | None, fresh: RunRecord) -> RunRecord:
    """The record of a start that resumes: the figures of the parts before stay until rank 0 has trained a step."""
    if before is None:
        return fresh
    return replace(
        before,
        name=fresh.name,
        command=fresh.command,
        started=fresh.started,
        versions=fresh.versions,
        hardware=fresh.hardware,
        status=fresh.status,
        error=None,
        overrides=fresh.overrides,
        arguments=fresh.arguments,
    )
