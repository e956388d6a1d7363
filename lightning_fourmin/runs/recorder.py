"""The callback that keeps `run.json` up to date with what only a rank knows: arithmetic, plans and figures."""

import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_fourmin.callbacks.scaling_monitor import ScalingMonitor
from lightning_fourmin.models.classifier import ImageClassifier
from lightning_fourmin.precision.plugin import FourMinPrecision
from lightning_fourmin.runs.folder import RESUMED, say
from lightning_fourmin.runs.record import BucketRecord, ModelSize, RunRecord, Summary, TableRecord, hardware
from lightning_fourmin.strategy import FourMinStrategy
from lightning_fourmin.text import duration

NUM_UNTIMED, NUM_TIMED, TIMED_S = 3, 10, 5.0
"""The first batches, which warm up; and how many batches and seconds after them tell the length of an epoch."""
LONG_EPOCH_S = 3600.0
"""The length from which on an epoch gets a warning."""


class RunRecorder(Callback):
    """Rewrites the record in the run's folder while rank 0 trains; the other ranks write nothing.

    The command has written the record before the ranks started, and does not touch it until they have ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_trained = False
        self._num_batches, self._since_s = 0, 0.0
        """The batches since the start, and when those that are timed began; the length of an epoch is told once."""

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lets the ModelCheckpoints go on where those of the resumed run ended, in a folder of their own.

        Otherwise each would forget the best score so far, and `best.ckpt` would be the best since the resume. This is
        called before they load their state. The files come along, but for those that were saved after the checkpoint.
        """
        loaded = Path(str(trainer.ckpt_path))
        for saver in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(saver.state_key)
            if not isinstance(saver, ModelCheckpoint) or saver.dirpath is None or not state:
                continue
            before, now = str(state["dirpath"]), str(saver.dirpath)
            if before == now:
                continue
            if trainer.is_global_zero:
                for path in {loaded, Path(state["best_model_path"])}:
                    _bring_along(path, Path(now), loaded)
            for name in ("dirpath", "best_model_path", "last_model_path", "kth_best_model_path"):
                state[name] = state[name].replace(before, now)
            state["best_k_models"] = {
                path.replace(before, now): score for path, score in state["best_k_models"].items()
            }

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:
            for logger in trainer.loggers:
                logger.log_metrics({RESUMED: 1.0}, step=trainer.global_step)

    # When `on_train_start` is called the module has no rates yet, and `on_train_epoch_start` is not called where a run
    # resumes in the middle of an epoch.
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.is_global_zero and not self._has_trained:
            self._has_trained = True
            # A run that resumes has another summary at its end: that of its earlier part no longer holds.
            self._update(summary=Summary(), **_plans(trainer, pl_module))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not trainer.is_global_zero or self._num_batches < 0:
            return
        self._num_batches += 1
        if self._num_batches == NUM_UNTIMED:
            self._since_s = time.monotonic()
        took_s, num_timed = time.monotonic() - self._since_s, self._num_batches - NUM_UNTIMED
        if num_timed >= NUM_TIMED and took_s >= TIMED_S:
            self._num_batches = -1
            if trainer.num_training_batches < math.inf:
                _say_length(trainer, took_s / num_timed)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            # Lightning counts the epoch when its validation is over.
            self._update(summary=_summary(trainer, trainer.current_epoch + trainer.is_last_batch))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that was complete when it resumed keeps its figures.
        if trainer.is_global_zero and self._has_trained:
            self._update(summary=_summary(trainer, trainer.current_epoch))

    def _update(self, **changes: Any) -> None:
        """Changes some fields of the record."""
        replace(RunRecord.read(self._folder), **changes).write(self._folder)


def _say_length(trainer: Trainer, batch_s: float) -> None:
    """Says how long the rest will take, as soon as that is known."""
    epoch_s, step_ms = trainer.num_training_batches * batch_s, 1e3 * batch_s * trainer.accumulate_grad_batches
    left_s = batch_s * trainer.accumulate_grad_batches * (trainer.estimated_stepping_batches - trainer.global_step)
    say(
        f"{step_ms:.3g} ms a step, about {duration(epoch_s)} an epoch, {duration(left_s)} to the end without validation"
    )
    if epoch_s > LONG_EPOCH_S:
        say("an epoch is that long: a smaller image_size or model, fewer samples or more ranks make it shorter")


def _bring_along(path: Path, folder: Path, loaded: Path) -> None:
    """Gives a checkpoint to another folder, unless it is newer than the one that was loaded."""
    target = folder / path.name
    if path.is_file() and not target.exists() and path.stat().st_mtime_ns <= loaded.stat().st_mtime_ns:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)  # a checkpoint is replaced as a whole, never written into
        except OSError:
            shutil.copy2(path, target)


def _plans(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The fields of the record that are known when training starts.

    Each is set, if only to nothing: the part of the run before this one may have had another strategy.
    """
    parameters = list(module.parameters())
    named = module.hparams.get("model")
    name = named if isinstance(named, str) else type(module).__name__
    # Any LightningModule may be trained; ours plans its rates.
    rate_plan = module.rate_plan if isinstance(module, ImageClassifier) else None
    plan = trainer.strategy.plan if isinstance(trainer.strategy, FourMinStrategy) else None
    fusion_plan, is_sent = None, trainer.world_size > 1
    if plan is not None and plan.fusion is not None:
        fusion_plan = tuple(BucketRecord.of(row, is_sent) for row in plan.rows)
    return {
        "arithmetic": () if rate_plan is None else tuple(rate_plan.in_words()),
        "model": ModelSize(name, sum(p.numel() for p in parameters), len(parameters)),
        "topology": None if plan is None else str(plan.topology),
        "world_size": trainer.world_size,
        "fusion_plan": fusion_plan,
        "table": TableRecord.of(plan.table) if plan is not None and is_sent else None,
        "hardware": hardware(),
    }


def _summary(trainer: Trainer, num_epochs: int) -> Summary:
    """The figures of the run up to now."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found: dict[str, Any] = {}
    if isinstance(trainer.precision_plugin, FourMinPrecision) and (scale := trainer.precision_plugin.loss_scale):
        found |= {"skipped_steps": scale.skipped_steps, "loss_scale": scale.value}
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    scaling = next((callback.summary for callback in callbacks if isinstance(callback, ScalingMonitor)), None)
    if scaling is not None:
        names = ("S", "N", "e", "e_low", "e_high", "step_ms", "exposed_ms")
        found |= {"images_per_s": scaling.T, **{name: getattr(scaling, name) for name in names}}
    return Summary(
        top1=metrics.get("val/top1"),
        top5=metrics.get("val/top5"),
        val_loss=metrics.get("val/loss"),
        epochs=num_epochs,
        steps=trainer.global_step,
        **found,
    )
