"""Gradients that are not finite: found after the all-reduce, also where a rank keeps some, and put into words."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
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


def outside_of(module: nn.Module, optimizers: list[Optimizer]) -> list[nn.Parameter]:
    """Parameters that optimizers have and the module does not."""
    inside = set(module.parameters())
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"] if parameter not in inside]


def ranks_differ(module: nn.Module, optimizers: list[Optimizer]) -> bool:
    """Whether some gradients are not all-reduced, so that one rank may find a bad one alone."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return bool(outside_of(module, optimizers)) or any(name in ignored for name, _ in module.named_parameters())


@dataclass(frozen=True)
class BadStep:
    """A step whose gradients are not finite, as one rank sees it."""

    global_step: int
    epoch: int
    parameter: str | None
    """The bad one that the backward pass came to first, if layers are registered in the order in which they run; None:
    only other ranks have a bad one."""
    num_bad: int
    num_gradients: int

    @classmethod
    def examine(cls, module: LightningModule, optimizer: Optimizer) -> "BadStep":
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [("a parameter outside of the module", p) for p in outside_of(module, [optimizer])]
        parameters += [(repr(name), p) for name, p in module.named_parameters() if p in mine]
        gradients = [(name, p.grad) for name, p in parameters if p.grad is not None]
        bad = [name for name, gradient in gradients if not _values(gradient).isfinite().all()]
        parameter = bad[-1] if bad else None
        return cls(module.trainer.global_step, module.trainer.current_epoch, parameter, len(bad), len(gradients))

    def __str__(self) -> str:
        step = f"global_step {self.global_step} of epoch {self.epoch}"
        if self.parameter is None:
            return f"{step} (on another rank; the gradients of this one are finite)"
        amount = f"{self.num_bad} of {self.num_gradients} gradients"
        if self.num_bad == self.num_gradients:
            amount = "all gradients, so it began before the backward pass: in the batch, a layer or the loss"
        return f"{step} ({self.parameter} first; {amount})"


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
