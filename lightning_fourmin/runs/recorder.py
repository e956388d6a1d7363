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

    # At the start of training the module has no rates yet. The hook for the start of an epoch is not called where a run
    # resumes in the middle of one.
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.is_global_zero and not self._has_trained:
            self._has_trained = True
            # The figures of a part before this one are no longer those of the run.
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
        replace(RunRecord.read(self._folder), **changes).write(self._folder)


def _plans(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    parameters = list(module.parameters())
    named = module.hparams.get("model")
    name = named if isinstance(named, str) else type(module).__name__
    # All of them, those that there are not as well: the part before this one may have had another strategy.
    plans: dict[str, Any] = {
        "arithmetic": (),
        "topology": None,
        "fusion_plan": None,
        "table": None,
        "model": ModelSize(name, sum(p.numel() for p in parameters), len(parameters)),
        "world_size": trainer.world_size,
        "hardware": hardware(),
    }
    # Any LightningModule may be trained; ours plans its rates.
    if isinstance(module, ImageClassifier) and module.rate_plan is not None:
        plans["arithmetic"] = tuple(module.rate_plan.in_words())
    strategy = trainer.strategy
    if isinstance(strategy, FourMinStrategy):
        plan, is_sent = strategy.plan, trainer.world_size > 1
        if plan is not None:
            plans["topology"] = str(plan.topology)
            if plan.fusion is not None:
                plans["fusion_plan"] = tuple(BucketRecord.of(row, is_sent) for row in plan.rows)
            if is_sent:
                plans["table"] = TableRecord.of(plan.table)
    return plans


def _summary(trainer: Trainer, num_epochs: int) -> Summary:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    precision = trainer.precision_plugin
    scale = precision.loss_scale if isinstance(precision, FourMinPrecision) else None
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    scaling = next((callback.summary for callback in callbacks if isinstance(callback, ScalingMonitor)), None)
    return Summary(
        top1=metrics.get("val/top1"),
        top5=metrics.get("val/top5"),
        val_loss=metrics.get("val/loss"),
        epochs=num_epochs,
        steps=trainer.global_step,
        images_per_s=scaling.T if scaling else None,
        S=scaling.S if scaling else None,
        N=scaling.N if scaling else None,
        e=scaling.e if scaling else None,
        step_ms=scaling.step_ms if scaling else None,
        exposed_ms=scaling.exposed_ms if scaling else None,
        skipped_steps=scale.skipped_steps if scale else None,
        loss_scale=scale.value if scale else None,
    )
