"""The callback that keeps `run.json` up to date with what only a rank knows: arithmetic, plans and figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_fourmin.callbacks.scaling_monitor import ScalingMonitor
from lightning_fourmin.models.classifier import ImageClassifier
from lightning_fourmin.precision.plugin import FourMinPrecision
from lightning_fourmin.runs.folder import RESUMED
from lightning_fourmin.runs.record import BucketRecord, ModelSize, RunRecord, Summary, TableRecord, hardware
from lightning_fourmin.strategy import FourMinStrategy


class RunRecorder(Callback):
    """Rewrites the record in the run's folder while rank 0 trains; the other ranks write nothing.

    The command has written the record before the ranks started, and does not touch it until they have ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_trained = False

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
