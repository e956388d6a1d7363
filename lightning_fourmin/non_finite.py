"""Gradients that are not finite: found after the all-reduce, where all ranks see the same, and put into words."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer


def all_finite(gradients: list[Tensor]) -> bool:
    if not gradients:
        return True
    found = torch.zeros((), device=gradients[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_([_values(g) for g in gradients], found, torch.ones_like(found))
    return not found.item()


def _values(gradient: Tensor) -> Tensor:
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


@dataclass(frozen=True)
class BadStep:
    """A step whose gradients are not finite."""

    global_step: int
    epoch: int
    parameter: str
    """The bad one that the backward pass came to first, if layers are registered in the order in which they run."""
    num_bad: int
    num_gradients: int

    @classmethod
    def examine(cls, module: LightningModule, optimizer: Optimizer) -> "BadStep":
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        gradients = [(n, p.grad) for n, p in module.named_parameters() if p in mine and p.grad is not None]
        bad = [name for name, gradient in gradients if not _values(gradient).isfinite().all()]
        parameter = repr(bad[-1]) if bad else "a parameter outside of the module"
        return cls(module.trainer.global_step, module.trainer.current_epoch, parameter, len(bad), len(gradients))

    def __str__(self) -> str:
        amount = f"{self.num_bad} of {self.num_gradients} gradients"
        if self.num_bad == self.num_gradients:
            amount = "all gradients, so it began before the backward pass: in the batch, a layer or the loss"
        return f"global_step {self.global_step} of epoch {self.epoch} ({self.parameter} first; {amount})"


def losses_of_ranks(trainer: Trainer, loss: Tensor | None) -> str:
    """The losses of the step that are not finite, with their ranks; called by all ranks together."""
    if loss is None:
        return "the loss is not known"
    losses = values_of_ranks(trainer, loss)
    bad = [f"{value:g} on rank {rank}" for rank, value in enumerate(losses) if not math.isfinite(value)]
    return f"the loss is {', '.join(bad)}" if bad else "the loss is finite on all ranks"


def values_of_ranks(trainer: Trainer, value: Tensor) -> list[float]:
    mine = value.detach().float().mean().reshape(1)  # a loss may be a vector where a gradient is given with it
    everyones = [mine]
    if isinstance(trainer.strategy, DDPStrategy):
        everyones = [torch.zeros_like(mine) for _ in range(trainer.world_size)]
        dist.all_gather(everyones, mine)
    return [float(found) for found in everyones]
