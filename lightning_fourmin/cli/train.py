"""`fourmin train`: composes a training, runs its ranks, and leaves a folder with its record and report."""

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
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from lightning_fourmin.callbacks.preemption import EXIT_CODE as PREEMPTED
from lightning_fourmin.cli import INTERRUPTED
from lightning_fourmin.cli.hydra_app import give_up, run_hydra
from lightning_fourmin.cli.outcome import closing_lines
from lightning_fourmin.cli.spawn_ranks import message_of, run_ranks
from lightning_fourmin.cli.train_config import num_local_ranks, settled
from lightning_fourmin.cli.train_rank import external_rank, train
from lightning_fourmin.errors import RankError, RunError
from lightning_fourmin.report.run_page import write_report
from lightning_fourmin.runs.folder import make_room
from lightning_fourmin.runs.hardware import hardware, versions
from lightning_fourmin.runs.record import ERROR_NAME, RUN_NAME, RunRecord, Status
from lightning_fourmin.runs.requeue import is_queued_again
from lightning_fourmin.runs.restart import overrides_of_restart, remember_run
from lightning_fourmin.runs.resume import run_of, saved, say
from lightning_fourmin.runs.sweep import is_sweep

EXIT_CODES = {"failed": 1, "interrupted": INTERRUPTED, "preempted": PREEMPTED}


def main() -> None:
    if external_rank() is not None and {"-m", "--multirun"} & set(sys.argv):
        give_up("train", "a sweep starts the ranks of each job itself: run it without torchrun or srun")
    if external_rank():
        # The run's folder is rank 0's.
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
    sys.argv += overrides_of_restart()
    run_hydra("train", _job)


def _job(config: DictConfig) -> float:
    """One training; gives the metric to Hydra's sweepers, NaN if it failed."""
    hydra = HydraConfig.get()
    if rank := external_rank():
        try:
            train(settled(config, Path(config.run_dir).absolute()))
        except Exception as error:
            give_up("train", f"rank {rank}: {message_of(error)}")
        return math.nan
    folder, sweeping = Path(hydra.runtime.output_dir), hydra.mode == RunMode.MULTIRUN
    # Whether it goes on is no setting of a job; which checkpoint it begins from is one.
    goes_on = ("resume=true", "resume=false")
    overrides = tuple(text for text in hydra.overrides.task if text.lower() not in goes_on) if sweeping else ()
    if sweeping and folder.name != str(hydra.job.num):
        give_up("train", "hydra.sweep.subdir is not the number of the job, by which reports and resume=true find it")
    if sweeping and hydra.job.num == 0 and not _resumes(config) and is_sweep(folder.parent):
        give_up("train", f"{folder.parent} holds a sweep: resume=true goes on with it, or give another hydra.sweep.dir")
    if not config.name:
        give_up("train", "name is not given: write experiment=none instead of ~experiment, or name=NAME")
    if sweeping:
        print(f"\njob {hydra.job.num}: {' '.join(overrides)}", flush=True)
    record = _done_before(config, folder, overrides) if sweeping and _resumes(config) else None
    if record is None:
        with _alone_in(folder):
            record = _run(config, folder, overrides)
    ok = record.status == "done"
    print("\n".join(closing_lines(record, folder)), file=sys.stdout if ok else sys.stderr, flush=True)
    if not ok and not (record.status == "failed" and sweeping):
        sys.exit(EXIT_CODES[record.status])
    # An unknown metric is among the reasons to fail.
    value = getattr(record.summary, config.metric) if ok else None
    return math.nan if value is None else float(value)


def _resumes(config: DictConfig) -> bool:
    return config.resume is not None and config.resume is not False


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


def _done_before(config: DictConfig, folder: Path, overrides: tuple[str, ...]) -> RunRecord | None:
    """The record of a job of a resumed sweep that needs nothing more; others go on where they were, or begin."""
    going_on = config.resume is True
    if saved(folder):
        config.resume = str(folder)
    elif going_on:
        config.resume = False
    if not (folder / RUN_NAME).is_file():
        if going_on and folder.name == "0":  # jobs run in order, so there was none
            say(f"{folder.parent} has no jobs to go on with: the sweep begins (hydra.sweep.dir names an earlier one)")
        return None
    try:
        record = RunRecord.read(folder)
    except RunError as error:
        give_up("train", str(error))
    if record.overrides != overrides:
        its = " ".join(record.overrides)
        give_up("train", f"{folder} holds the job `{its}`: give the sweep another hydra.sweep.dir")
    return record if record.status == "done" else None


def _run(config: DictConfig, folder: Path, overrides: tuple[str, ...]) -> RunRecord:
    """Trains and gives the record of how that ended, which is in the folder with everything else."""
    start_s = time.monotonic()
    earlier = _record_of(folder)
    # What cannot begin leaves figures and time of the run that the folder holds.
    seconds_before = _seconds(earlier)
    started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
    command = shlex.join(["fourmin", "train", *sys.argv[1:]])
    fresh = RunRecord(config.name, command, started, versions(), hardware(), overrides=overrides)
    if earlier is None:
        fresh.write(folder)
    status: Status = "done"
    error = None
    (folder / ERROR_NAME).unlink(missing_ok=True)
    try:
        plain = settled(config, folder)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(plain))
        resumed = run_of(plain["resume"])
        if resumed is None or not resumed.samefile(folder):
            seconds_before = 0.0 if resumed is None else _seconds(_record_of(resumed))
        # A part that is killed leaves what those before it took.
        replace(fresh, seconds=seconds_before or None).write(folder)
        make_room(folder, resumed, slurm_goes_on=is_queued_again())
        remember_run(folder)
        if external_rank() is None:
            run_ranks(train, plain, num_local_ranks(plain["trainer"]))
        else:
            train(plain)
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
    record = replace(RunRecord.read(folder), seconds=seconds, status=status, error=error)
    record.write(folder)
    try:
        write_report(folder)
    except Exception as failure:
        # A page that cannot be drawn does not undo a training.
        print(f"fourmin train: no report: {message_of(failure)}", file=sys.stderr)
    return record


def _record_of(run: Path) -> RunRecord | None:
    with suppress(RunError):
        return RunRecord.read(run)
    return None


def _seconds(record: RunRecord | None) -> float:
    """What a run has taken up to now; 0 where nobody knows."""
    return 0.0 if record is None or record.seconds is None else record.seconds
