"""A checkpoint in the middle of an epoch when the run is asked to end: by a scheduler, or a machine that goes down."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

FILE_NAME = "last.ckpt"
EXIT_CODE = 128 + signal.SIGTERM


class PreemptionCheckpoint(Callback):
    """Saves and ends all ranks after the step in which any of them gets SIGTERM; the exit code is 143.

    The file is `last.ckpt`, which `ckpt_path="last"` goes on from. Lightning's own handler broadcasts from wherever the
    signal finds a rank, which blocks if the others are elsewhere; this callback takes its place while training runs. A
    validation that is under way is finished first.

    Args:
        dirpath: where to save; None: beside the files of the Trainer's ModelCheckpoint, else its `default_root_dir`.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self._dirpath = dirpath
        self._asked = False
        self._step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked, self._step = False, trainer.global_step
        if threading.current_thread() is threading.main_thread():
            # Lightning puts back what was there before when the run ends.
            signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # Between two steps: gradients that accumulate are in no checkpoint.
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not trainer.strategy.reduce_boolean_decision(self._asked, all=False):
            return
        path = self._folder(trainer) / FILE_NAME
        trainer.save_checkpoint(path)
        rank_zero_info(f"asked to end by SIGTERM: saved {path} after step {self._step}")
        raise SIGTERMException(EXIT_CODE)

    def _folder(self, trainer: Trainer) -> Path:
        saver = trainer.checkpoint_callback
        beside = saver.dirpath if isinstance(saver, ModelCheckpoint) else None
        return Path(self._dirpath or beside or trainer.default_root_dir)
