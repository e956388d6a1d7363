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
from datetime import datetime, timezone
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from lightning_fourmin.app import INTERRUPTED
from lightning_fourmin.app.closing import closing_lines
from lightning_fourmin.app.job import external_rank, train
from lightning_fourmin.app.launch import RankError, message_of, run_ranks
from lightning_fourmin.app.machine import hardware, versions
from lightning_fourmin.app.queued_again import is_queued_again
from lightning_fourmin.app.restart import overrides_of_restart, remember_run
from lightning_fourmin.app.resume import run_of, saved
from lightning_fourmin.app.settle import num_local_ranks, settled
from lightning_fourmin.app.verb import give_up, run_hydra
from lightning_fourmin.callbacks.preemption import EXIT_CODE as PREEMPTED
from lightning_fourmin.report.page import write_report
from lightning_fourmin.report.parts import make_room
from lightning_fourmin.report.run_files import ERROR_NAME, RUN_NAME, RunError, RunRecord, Status

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
    overrides = tuple(hydra.overrides.task) if sweeping else ()
    if sweeping and folder.name != str(hydra.job.num):
        give_up("train", "hydra.sweep.subdir is not the number of the job, by which reports and resume=true find it")
    if not config.name:
        give_up("train", "name is not given: write experiment=none instead of ~experiment, or name=NAME")
    if sweeping:
        print(f"\njob {hydra.job.num}: {' '.join(overrides)}", flush=True)
    record = _done_before(config, folder, overrides) if sweeping and config.resume is True else None
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
    config.resume = str(folder) if saved(folder) else False
    if not (folder / RUN_NAME).is_file():
        return None
    record = RunRecord.read(folder)
    then, now = ([text for text in texts if not text.startswith("resume=")] for texts in (record.overrides, overrides))
    if then != now:
        give_up("train", f"{folder} holds the job `{' '.join(then)}`: give the sweep another hydra.sweep.dir")
    return record if record.status == "done" else None


def _run(config: DictConfig, folder: Path, overrides: tuple[str, ...]) -> RunRecord:
    """Trains and gives the record of how that ended, which is in the folder with everything else."""
    start_s = time.monotonic()
    seconds_here, seconds_before = _seconds_of(folder), 0.0
    started = datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds")
    command = shlex.join(["fourmin", "train", *sys.argv[1:]])
    RunRecord(config.name, command, started, versions(), hardware(), overrides=overrides).write(folder)
    status: Status = "done"
    error = None
    (folder / ERROR_NAME).unlink(missing_ok=True)
    try:
        plain = settled(config, folder)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(plain))
        resumed = run_of(plain["resume"])
        if resumed is not None:
            seconds_before = seconds_here if resumed.samefile(folder) else _seconds_of(resumed)
            # A part that is killed leaves what those before it took.
            replace(RunRecord.read(folder), seconds=seconds_before).write(folder)
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


def _seconds_of(run: Path) -> float:
    """What a run has taken up to now; 0 where it does not say."""
    with suppress(RunError):
        return RunRecord.read(run).seconds or 0.0
    return 0.0
