"""Keeps `run.json` up to date with what only a rank knows: arithmetic, plans and figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_fourmin.callbacks.scaling_monitor import ScalingMonitor
from lightning_fourmin.models.classifier import ImageClassifier
from lightning_fourmin.precision.plugin import FourMinPrecision
from lightning_fourmin.runs.folder import RESUMED
from lightning_fourmin.runs.hardware import hardware
from lightning_fourmin.runs.record import BucketRecord, ModelSize, RunRecord, Summary, TableRecord
from lightning_fourmin.strategy import FourMinStrategy


class RunRecorder(Callback):
    """Rewrites the record that lies in the run's folder, on rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_plans = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Ranks that torchrun or srun started know no folder, since its name has the time in it.
        self._folder = trainer.strategy.broadcast(self._folder)
        trainer._default_root_dir = str(self._folder)  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:
            for logger in trainer.loggers:
                logger.log_metrics({RESUMED: 1.0}, step=trainer.global_step)

    # At the start of training the module has no rates yet; a run that goes on in mid-epoch is not told that one starts.
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.is_global_zero and not self._has_plans:
            self._has_plans = True
            self._update(**_plans(trainer, pl_module))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            # Lightning counts the epoch when its validation is over.
            self._update(summary=_summary(trainer, trainer.current_epoch + trainer.is_last_batch))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._update(summary=_summary(trainer, trainer.current_epoch))

    def _update(self, **changes: Any) -> None:
        replace(RunRecord.read(self._folder), **changes).write(self._folder)


def _plans(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    parameters = list(module.parameters())
    named = module.hparams.get("model")
    name = named if isinstance(named, str) else type(module).__name__
    plans: dict[str, Any] = {
        "model": ModelSize(name, sum(p.numel() for p in parameters), len(parameters)),
        "world_size": trainer.world_size,
        "hardware": hardware(),
    }
    # Any LightningModule may be trained; ours plans its rates.
    if isinstance(module, ImageClassifier) and module.rate_plan is not None:
        plans["arithmetic"] = tuple(module.rate_plan.in_words())
    strategy = trainer.strategy
    if isinstance(strategy, FourMinStrategy):
        if strategy.fusion_plan is not None:
            plans["fusion_plan"] = tuple(BucketRecord.of(bucket) for bucket in strategy.fusion_plan.buckets)
        if strategy.table is not None:
            plans["topology"] = str(strategy.table.groups_of(strategy.topology))
            if trainer.world_size > 1:
                plans["table"] = TableRecord.of(strategy.table)
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
