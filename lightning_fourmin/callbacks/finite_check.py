"""Stops a run whose numbers are no longer finite, before its weights are spoilt."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fourmin.precision.overflow import BadStep, all_finite, losses_of_ranks, ranks_differ, values_of_ranks
from lightning_fourmin.precision.plugin import FourMinPrecision


class FiniteCheck(Callback):
    """Ends all ranks with an error, before the optimizer's step, when a gradient is not finite.

    The gradients are those after the all-reduce, so all ranks decide alike. They ask each other only if ranks keep
    gradients of their own (of parameters that DDP ignores, or that only optimizers have). If the precision plugin skips
    such steps (`FourMinPrecision`, Lightning's "16-mixed"), this callback checks nothing.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._loss: Tensor | None = None
        self._ranks_differ = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ranks_differ = ranks_differ(pl_module, trainer.optimizers)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        precision = trainer.precision_plugin
        has_scaler = isinstance(precision, MixedPrecision) and precision.scaler is not None
        if has_scaler or isinstance(precision, FourMinPrecision):
            return
        finite = all_finite([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
        if self._ranks_differ:
            finite = trainer.strategy.reduce_boolean_decision(finite)
        if finite:
            return
        # All ranks come here together, so the collectives below are safe.
        where = BadStep.examine(pl_module, optimizer)
        bad_batch = torch.tensor(_has_non_finite(self._batch), device=pl_module.device)
        bad_ranks = [str(rank) for rank, bad in enumerate(values_of_ranks(trainer, bad_batch)) if bad]
        batches = f"not finite on rank {', '.join(bad_ranks)}" if bad_ranks else "finite on all ranks"
        raise RuntimeError(
            f"gradients are not finite at {where}; {losses_of_ranks(trainer, self._loss)}; the batch is {batches}: "
            "look for bad data or lower the learning rate, then resume from the last checkpoint; the weights are as "
            "they were before this step"
        )

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._batch = self._loss = None


def _has_non_finite(batch: Any) -> bool:
    found: list[bool] = []
    apply_to_collection(batch, Tensor, lambda t: found.append(t.is_floating_point() and not t.isfinite().all()))
    return any(found)
