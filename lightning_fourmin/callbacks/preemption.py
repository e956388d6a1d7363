"""A checkpoint in the middle of an epoch when a scheduler, or a machine that shuts down, asks the run to end."""

import os
import signal
import subprocess
import time
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_fourmin._lightning import (
    ASK_BEFORE_BATCH,
    REQUEUE_HANDLER,
    SIGTERM_HANDLER,
    hpc_checkpoint_path,
    set_handler,
    sigterm_exception,
)

FILE_NAME = "last.ckpt"
EXIT_CODE = 128 + signal.SIGTERM
MAX_STEPS = 50
"""The largest number of steps after which ranks ask each other again, however fast steps have been: later steps may be
slower."""


class _Asked(IntEnum):
    """What a run is asked to do after it has saved. If it is asked for several things, the largest counts."""

    NOTHING = 0
    END = 1
    QUEUE_AGAIN = 2


class PreemptionCheckpoint(Callback):
    """Saves and ends all ranks soon after any of them gets SIGTERM; the exit code is 143.

    The file is `last.ckpt`. `ckpt_path="last"` finds it beside the files of the Trainer's ModelCheckpoint; without a
    ModelCheckpoint, give the path of the file. Ranks ask each other, in a collective, about once a second, after a step
    on which they have agreed. They ask after the last step of an epoch as well: then they save, finish the epoch with
    its validation, and save and end after the first step of the next epoch. Validation inside an epoch is finished
    before they ask. Ranks that are asked to end before the first step save nothing.

    Two parts of Lightning are replaced during a fit. Its signal handler broadcasts from wherever the signal finds a
    rank, which blocks if the other ranks are elsewhere; the handlers of this class only set a field, in the main thread
    like all handlers of Python. Lightning's broadcast before every batch, in which ranks wait for each other, is left
    out.

    The same happens when SLURM warns that the time is up (SIGUSR1, `#SBATCH --signal=SIGUSR1@120`); Lightning would
    save in the middle of a step. Then the job is also queued again, and a second file is saved where Lightning looks
    for one, so that the job resumes with `ckpt_path="last"` and without.

    Args:
        dirpath: The folder to save in. None: beside the files of the Trainer's ModelCheckpoint, or without one in the
            Trainer's `default_root_dir`.
    """

    interval_s = 1.0
    """The approximate time between two questions of the ranks to each other."""

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self._dirpath = dirpath
        self._heard = _Asked.NOTHING
        """What this rank has been asked to do; signal handlers set it."""
        self._asked = _Asked.NOTHING
        """What any rank has been asked to do; all ranks know it and act on it together."""
        self._step = self._next_step = 0
        """The steps of the last and of the next question."""
        self._time_s = 0.0
        """The moment of the last question."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._heard = self._asked = _Asked.NOTHING
        set_handler(trainer, SIGTERM_HANDLER, self._ask_to_end if stage == "fit" else None)
        set_handler(trainer, REQUEUE_HANDLER, self._ask_to_queue_again if stage == "fit" else None)

    def _ask_to_end(self, number: int, frame: FrameType | None) -> None:
        self._heard = max(self._heard, _Asked.END)

    def _ask_to_queue_again(self, number: int, frame: FrameType | None) -> None:
        self._heard = _Asked.QUEUE_AGAIN

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step, self._time_s = trainer.global_step, time.monotonic()
        self._agree(trainer)
        # No step has been timed yet, so the ranks ask again after the first one.
        self._next_step = self._step + 1
        if self._asked:
            rank_zero_info(f"{self._by_whom} before the first step: nothing is saved")
            raise sigterm_exception(EXIT_CODE)
        vars(trainer.fit_loop.epoch_loop)[ASK_BEFORE_BATCH] = lambda: None

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # Between two batches of a step nothing is saved: accumulated gradients would be missing in the checkpoint.
        if trainer.global_step < self._next_step and not trainer.is_last_batch:
            return
        self._agree(trainer)
        if self._asked:
            self._save(trainer)
            if not trainer.is_last_batch:
                raise sigterm_exception(EXIT_CODE)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agree(trainer)
        if self._asked:
            self._save(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(trainer.fit_loop.epoch_loop).pop(ASK_BEFORE_BATCH, None)
        if self._asked or self._heard:
            raise sigterm_exception(EXIT_CODE)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        vars(trainer.fit_loop.epoch_loop).pop(ASK_BEFORE_BATCH, None)
        # This comes last of all, because SLURM ends a job at once that is queued again.
        if self._asked == _Asked.QUEUE_AGAIN and isinstance(exception, SIGTERMException) and trainer.is_global_zero:
            _queue_again()

    def _agree(self, trainer: Trainer) -> None:
        """Lets all ranks know whether any was asked, and agrees on the step of the next question.

        It is a step and no time because clocks differ. The call is a collective of all ranks.
        """
        step, time_s = trainer.global_step, time.monotonic()
        step_s = (time_s - self._time_s) / max(1, step - self._step)
        mine = torch.tensor([self._heard, step_s], dtype=torch.float32, device=trainer.strategy.root_device)
        asked, step_s = trainer.strategy.reduce(mine, reduce_op="max").tolist()
        self._asked, self._step, self._time_s = _Asked(int(asked)), step, time_s
        num_steps = 1 if asked else int(self.interval_s / max(step_s, 1e-6))
        self._next_step = step + max(1, min(MAX_STEPS, num_steps))

    @property
    def _by_whom(self) -> str:
        return "asked to end by " + ("SLURM" if self._asked == _Asked.QUEUE_AGAIN else "SIGTERM")

    def _save(self, trainer: Trainer) -> None:
        saver = trainer.checkpoint_callback
        beside = saver.dirpath if isinstance(saver, ModelCheckpoint) else None
        # The path is joined as text, since a Path would turn s3:// into s3:/.
        path = os.path.join(self._dirpath or beside or trainer.default_root_dir, FILE_NAME)
        trainer.save_checkpoint(path)
        rank_zero_info(f"{self._by_whom}: saved {path} after step {self._step}")
        if self._asked == _Asked.QUEUE_AGAIN:
            trainer.save_checkpoint(hpc_checkpoint_path(trainer))


def _queue_again() -> None:
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"SLURM job {job} is not queued again: {error}; it goes on where it was saved if you do it")
