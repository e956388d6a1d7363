"""Gradients that are not finite: finding them after the all-reduce, and describing them in error messages."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fourmin._lightning import check_and_unscale_, foreach_mul_, values_of_sparse


def unscale(gradients: Iterable[Tensor], factor: float) -> list[Tensor]:
    """Multiplies gradients by a factor and notes, in the same pass where possible, whether they are finite afterwards.

    Returns one flag for every device: a tensor on it that is not 0 if a gradient there is not finite. This function
    does not wait for a device; `any_set` does.
    """
    groups: defaultdict[tuple[torch.device, bool], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        # The kernel multiplies by a number in FP32, which has too few digits for float64. And it checks what it reads,
        # not what it writes: it does not see an overflow that a factor above 1 (a scale below 1) causes.
        one_pass = factor <= 1 and gradient.dtype is torch.float32 and gradient.layout is torch.strided
        groups[gradient.device, one_pass].append(gradient)
    flags = {device: torch.zeros((), device=device) for device, _ in groups}
    for (device, one_pass), group in groups.items():
        flag = flags[device]
        if one_pass:
            check_and_unscale_(group, flag, torch.full_like(flag, factor))
        else:
            if factor != 1:
                foreach_mul_(group, factor)
            check_and_unscale_([_values(gradient) for gradient in group], flag, torch.ones_like(flag))
    return list(flags.values())


def any_set(flags: list[Tensor]) -> bool:
    """Reads flags of `unscale`, which waits for their devices: true if a gradient is not finite."""
    return any(bool(flag) for flag in flags)


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all values of all gradients are finite; waits for their devices."""
    return not any_set(unscale(gradients, 1.0))


def _values(gradient: Tensor) -> Tensor:
    values = values_of_sparse(gradient) if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def outside_of(module: nn.Module, optimizers: list[Optimizer]) -> list[nn.Parameter]:
    """Returns the parameters that optimizers have and the module does not."""
    inside = set(module.parameters())
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"] if parameter not in inside]


def ranks_differ(module: nn.Module, optimizers: list[Optimizer]) -> bool:
    """Whether some gradients are not all-reduced, so that a single rank may find a bad one."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return bool(outside_of(module, optimizers)) or any(name in ignored for name, _ in module.named_parameters())


@dataclass(frozen=True)
class BadStep:
    """A step whose gradients are not finite, as one rank sees it."""

    global_step: int
    """The number of steps before this one."""
    epoch: int
    """The number of epochs before that of this step."""
    parameter: str | None
    """The first parameter that got a bad gradient in the backward pass, provided that layers are registered in the
    order in which they run; None if only other ranks have a bad gradient."""
    num_bad: int
    """The number of this rank's gradients that are not finite."""
    num_gradients: int
    """The number of gradients of the step."""

    @classmethod
    def examine(cls, module: LightningModule, optimizer: Optimizer) -> "BadStep":
        """Looks through the gradients of an optimizer one by one; waits for the device at each."""
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [("a parameter outside of the module", p) for p in outside_of(module, [optimizer])]
        parameters += [(repr(name), p) for name, p in module.named_parameters() if p in mine]
        gradients = [(name, p.grad) for name, p in parameters if p.grad is not None]
        bad = [name for name, gradient in gradients if not _values(gradient).isfinite().all()]
        # Backward runs through the layers from the last to the first, so the last name got its gradient first.
        parameter = bad[-1] if bad else None
        return cls(module.trainer.global_step, module.trainer.current_epoch, parameter, len(bad), len(gradients))

    def __str__(self) -> str:
        """Says where the step is and how many gradients are bad, for use in a sentence."""
        step = f"global_step {self.global_step} of epoch {self.epoch}"
        if self.parameter is None:
            return f"{step} (on another rank; the gradients of this one are finite)"
        amount = f"{self.num_bad} of {self.num_gradients} gradients"
        if self.num_bad == self.num_gradients:
            amount = "all gradients, so it began before the backward pass: in the batch, a layer or the loss"
        return f"{step} ({self.parameter} first; {amount})"


def losses_of_ranks(trainer: Trainer, loss: Tensor | None) -> str:
    """Says which ranks have a loss that is not finite. The call is a collective: all ranks make it together."""
    if loss is None:
        return "the loss is not known"
    losses = values_of_ranks(trainer, loss)
    bad = [f"{value:g} on rank {rank}" for rank, value in enumerate(losses) if not math.isfinite(value)]
    return f"the loss is {', '.join(bad)}" if bad else "the loss is finite on all ranks"


def values_of_ranks(trainer: Trainer, value: Tensor) -> list[float]:
    """Gathers the mean of a tensor from every rank. The call is a collective: all ranks make it together."""
    # The loss is a vector if the user calls backward with a gradient for each of its elements.
    mine = value.detach().float().mean().reshape(1)
    everyones = [mine]
    if isinstance(trainer.strategy, DDPStrategy):
        everyones = [torch.zeros_like(mine) for _ in range(trainer.world_size)]
        dist.all_gather(everyones, mine)
    return [float(found) for found in everyones]
