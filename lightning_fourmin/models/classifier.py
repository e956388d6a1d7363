"""`ImageClassifier`: a LightningModule of a net, its loss and metrics, and the recipe for large batches."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_fourmin.models import build_model
from lightning_fourmin.optim.lars import LARS
from lightning_fourmin.optim.param_groups import param_groups
from lightning_fourmin.optim.schedule import GlobalBatch, PolySchedule, RatePlan, Schedule

# MLPerf's recipe for a batch of 4096, which the schedule scales to the batch of the run.
DEFAULT_OPTIMIZER = partial(LARS, lr=10.0)
DEFAULT_SCHEDULE = PolySchedule(base_batch=4096, warmup_epochs=5)
STEPS_PER_EPOCH = "steps_per_epoch"
"""Key in a checkpoint: the steps that an epoch had in the run that was saved.

A run that is resumed with another batch has other steps per epoch and converts the scheduler's count of steps with it.
"""


class ImageClassifier(LightningModule):
    """Classifies images; works with any data module or loader whose batches are (images, labels), and any strategy.

    It logs `train/loss` and `lr` in training, `val/loss`, `val/top1` and `val/top5` in validation, and the same as
    `test/...` in testing. Validation and testing count every sample of all ranks once, however unequal the batches are.

    Lightning calls its hooks in the main thread of each rank, in this order: `configure_optimizers` makes the optimizer
    with the options that were configured; `on_fit_start` notes them; a checkpoint, if the run is resumed, replaces them
    by those of the saved run; `on_train_start` applies the noted ones again and plans the rate of every step.

    Args:
        model: name of a net in `lightning_fourmin.models.MODELS`, or a net of your own.
        num_classes: number of classes; labels are below it.
        model_options: arguments of the named net, such as `{"bn5": False}`.
        optimizer: makes an optimizer of parameter groups; None: LARS with MLPerf's rate.
        weight_decay: decay of weights; biases and norm layers have none, and no trust ratio.
        decay_all: whether biases and norm layers are decayed and get trust ratios as weights do, for comparisons.
        schedule: gives the rate of each step; None: that of MLPerf's recipe, in proportion to the batch.
        label_smoothing: smoothing of the loss in training, at least 0 and below 1.
        channels_last: whether the net and its images have the memory format channels last.
        compile: whether torch compiles the net.
    """

    def __init__(
        self,
        model: str | nn.Module = "alexnet_bn",
        num_classes: int = 1000,
        *,
        model_options: dict[str, Any] | None = None,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        weight_decay: float = 2e-4,
        decay_all: bool = False,
        schedule: Schedule | None = None,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes} must be at least 2")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 1")
        if isinstance(model, nn.Module):
            if model_options:
                raise ValueError("model_options are for nets by name, but model is a net: build it with its options")
            self.save_hyperparameters(ignore=["model", "optimizer", "schedule"], logger=False)
            self.net = model
        else:
            self.save_hyperparameters(ignore=["optimizer", "schedule"], logger=False)
            self.net = build_model(model, num_classes, **(model_options or {}))
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.net.to(memory_format=self._memory_format)  # type: ignore[call-overload]
        self._optimizer, self._schedule = optimizer or DEFAULT_OPTIMIZER, schedule or DEFAULT_SCHEDULE
        self._weight_decay, self._decay_all = weight_decay, decay_all
        self._label_smoothing, self._compile = label_smoothing, compile
        self._configured_options: list[dict[str, Any]] = []
        """The options of each group of the optimizer as they are configured for this run."""
        self._option_names: set[str] = set()
        """The names of all options of the optimizer."""
        self.rate_plan: RatePlan | None = None
        """The rate of every step; None until training starts, as the number of steps is not known before."""
        self._saved_steps_per_epoch: float | None = None
        """The steps per epoch of the run that is resumed; None: nothing is resumed, or the rates are planned."""
        # A NaN stays in the mean. The default drops it, and would report the loss of only some of the samples.
        self.eval_loss = MeanMetric(nan_strategy=math.nan)
        self.top1, self.top5 = (
            # With fewer classes than five, top-5 is 1 by definition.
            MulticlassAccuracy(num_classes, top_k=min(k, num_classes), average="micro", validate_args=False)
            for k in (1, 5)
        )

    @override
    def setup(self, stage: str) -> None:
        # Only the net is compiled, because `self.log` cannot be. It is done here, because spawned ranks get the net
        # pickled: compiled earlier, it would arrive uncompiled.
        if self._compile:
            self.net.compile()

    @override
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.net(images.contiguous(memory_format=self._memory_format))
        return scores

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels, label_smoothing=self._label_smoothing)
        self.log("train/loss", loss, prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self(batch if isinstance(batch, Tensor) else batch[0])
        return scores

    def _evaluate(self, stage: str, batch: Any) -> None:
        images, labels = batch
        scores = self(images)
        # Metric objects add up counts over batches and ranks, so each batch weighs as much as it has samples.
        self.eval_loss.update(cross_entropy(scores, labels), weight=len(labels))
        self.top1.update(scores, labels)
        self.top5.update(scores, labels)
        self.log(f"{stage}/loss", self.eval_loss)
        self.log(f"{stage}/top1", self.top1, prog_bar=True)
        self.log(f"{stage}/top5", self.top5)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups = param_groups(self.net, self._weight_decay)
        if self._decay_all:
            groups = [{"params": list(self.net.named_parameters()), "weight_decay": self._weight_decay}]
        optimizer = self._optimizer(groups)
        # A lambda, not the bound method: a scheduler's state has the attributes of any callable but a plain function.
        scheduler = LambdaLR(optimizer, lambda step: self._lr_factor(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _lr_factor(self, step: int) -> float:
        return 1.0 if self.rate_plan is None else self.rate_plan.lr(step) / self.rate_plan.base_lr

    @override
    def on_fit_start(self) -> None:
        names = {"initial_lr", "weight_decay", "trust_coefficient", *getattr(self._optimizer, "keywords", {})}
        groups = self.trainer.optimizers[0].param_groups
        self._configured_options = [{name: group[name] for name in names & group.keys()} for group in groups]
        self._option_names = groups[0].keys() - {"params"}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.rate_plan is not None:
            checkpoint[STEPS_PER_EPOCH] = self.rate_plan.steps_per_epoch

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._saved_steps_per_epoch = checkpoint.get(STEPS_PER_EPOCH)

    def _apply_configured_options(self, optimizer: Optimizer, scheduler: LambdaLR) -> None:
        """Replaces the options that a resumed run got from its checkpoint by those that are configured."""
        # Lightning has restored the optimizer by now, so its groups have the options of the checkpoint.
        if unknown := self._option_names - optimizer.param_groups[0].keys():
            raise ValueError(
                f"the checkpoint is of another optimizer, which has no {', '.join(sorted(unknown))}: resume with the "
                "same optimizer, or train without resume"
            )
        changes = []
        for group, options in zip(optimizer.param_groups, self._configured_options, strict=False):
            changes += [
                f"{name.removeprefix('initial_')} {group[name]} -> {value}"
                for name, value in options.items()
                if name != "lr" and group[name] != value
            ]
            group.update(options)
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        if changes:
            rank_zero_info(f"Other options than those of the checkpoint: {', '.join(dict.fromkeys(changes))}.")

    @override
    def on_train_start(self) -> None:
        # Not earlier: asking Lightning for the number of steps before it has restored the loops would make it load the
        # train loader too early, and lose a resumed epoch.
        optimizer, scheduler = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(scheduler, LambdaLR)
        if self.trainer.ckpt_path is not None:
            self._apply_configured_options(optimizer, scheduler)
        base_lr = optimizer.param_groups[0]["initial_lr"]
        steps_per_epoch, total_steps = self._num_steps()
        saved, self._saved_steps_per_epoch = self._saved_steps_per_epoch, None
        if saved is not None and math.inf not in (saved, steps_per_epoch) and self.trainer.max_steps == -1:
            # `last_epoch` is the scheduler's count of steps. With another batch an epoch has another number of them.
            scheduler.last_epoch = round(scheduler.last_epoch * steps_per_epoch / saved)
        self.rate_plan = self._schedule.plan(base_lr, self._global_batch(), steps_per_epoch, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self._lr_factor(scheduler.last_epoch)
        rank_zero_info("\n".join(self.rate_plan.in_words()))
        if (warning := self.rate_plan.warning()) is not None:
            rank_zero_warn(warning)

    def _num_steps(self) -> tuple[float, int]:
        """The number of the optimizer's steps in an epoch, which may be infinite, and in the whole run."""
        trainer = self.trainer
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        if per_epoch < math.inf:
            # Lightning ends an epoch with a step, however few batches have accumulated by then.
            per_epoch = math.ceil(per_epoch)
        total = math.inf if trainer.max_epochs in (None, -1) else per_epoch * trainer.max_epochs
        if trainer.max_steps != -1:
            total = min(total, trainer.max_steps)
        if total == math.inf:
            raise ValueError("the schedule needs to know how many steps the run has: give the Trainer max_steps")
        return per_epoch, int(total)

    def _global_batch(self) -> GlobalBatch | None:
        """The parts of the global batch; None if neither the data module nor the loader says its batch size."""
        trainer = self.trainer
        for source in (getattr(trainer, "datamodule", None), trainer.train_dataloader):
            if isinstance(size := getattr(source, "batch_size", None), int):
                return GlobalBatch(size, trainer.world_size, trainer.accumulate_grad_batches)
        return None
