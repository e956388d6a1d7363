"""The precision plugin: forward and backward in FP16 or BF16, FP32 master weights, loss scale.

masters --cast--> 16-bit copies --forward, backward--> scaled gradients --all-reduce--> unscale --> optimizer's step
 FP32             weight_copies       x loss_scale          FP32           16-bit wire   + check    or step skipped
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fourmin._lightning import count_as_step, foreach_mul_
from lightning_fourmin.precision.cpu_half_ops import HALVES, CpuHalfOps, needs_cpu_half_ops
from lightning_fourmin.precision.loss_scale import INITIAL_SCALE, PATIENCE, LossScale
from lightning_fourmin.precision.overflow import BadStep, all_finite, any_set, losses_of_ranks, ranks_differ, unscale
from lightning_fourmin.precision.weight_copies import WeightCopies, keep_norms_in_fp32, tensors_of_norms

COMPUTE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes that steps compute in, by the names that users give."""


class FourMinPrecision(HalfPrecision):
    """16-bit weights and activations in steps, FP32 masters everywhere else.

    The module's parameters are the FP32 masters that optimizers, callbacks and checkpoints see. In training,
    validation, test and prediction steps `layer.weight` is a 16-bit copy, while `parameters()` still lists the masters:
    change weights through those. Norm layers (by type) stay in FP32. Steps run in `torch.autocast`, so losses are
    computed in FP32, and products round FP32 tensors (buffers such as position encodings, tensors made in the step) to
    16 bit. FP32 tensors of a batch arrive in 16 bit; float64 tensors arrive as they are.

    Outside of the backward pass gradients are FP32 and unscaled, so hooks, clipping and optimizers work as in FP32. A
    step with a gradient that is not finite on any rank is skipped on all of them, and counted: `fourmin/skipped_steps`
    and `fourmin/loss_scale` are logged.

    Lightning calls the methods of a plugin in this order, all from the thread that trains: `convert_module` (checkpoint
    weights are in the module by then), `connect` (optimizers exist), then for each batch `forward_context`,
    `pre_backward`, `backward` and `post_backward`. For the batch before a step, these four run in the closure that
    `optimizer_step` gets. In manual optimization everything, `optimizer_step` included, runs inside of
    `forward_context`.

    Args:
        dtype: "fp16" or "bf16".
        loss_scale: "dynamic" or a number; BF16 has FP32's range and is not scaled.
        half_kernels: Whether products are computed in FP32 and rounded (see `cpu_half_ops`). None: on CPUs they are,
            except for BF16 on CPUs that have units for it.

    Example:
        ```python
        Trainer(strategy="fourmin", precision="16-true")  # picks it
        Trainer(plugins=[FourMinPrecision("fp16", loss_scale=1024)])
        ```
    """

    _module: LightningModule
    _weight_copies: WeightCopies
    """Like `_module`, this is set by `convert_module`, before Lightning calls a method that needs it."""

    def __init__(
        self, dtype: str = "fp16", loss_scale: float | str = "dynamic", half_kernels: bool | None = None
    ) -> None:
        if dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype={dtype!r} is not known: choose one of {', '.join(map(repr, COMPUTE_DTYPES))}")
        super().__init__("16-true" if dtype == "fp16" else "bf16-true")
        self.dtype = COMPUTE_DTYPES[dtype]
        self.loss_scale = _loss_scale(dtype, loss_scale)
        self._half_kernels = half_kernels
        self._half_ops: AbstractContextManager[Any] = nullcontext()
        self._ranks_differ = False
        self._widened: dict[str, Tensor] = {}
        """The trained or normalising tensors, by name, that were 16 bit in the user's module and are FP32 now."""
        self._hooks: list[RemovableHandle] = []
        self._loss: Tensor | None = None
        """The loss of the last backward pass, for the error that names ranks whose loss is not finite."""
        self._overflow_flags: list[Tensor] | None = None
        """What the last backward pass found in the gradients of the optimizer, not yet read from the device; None if
        the gradients have to be looked at right before the step."""
        self._first_bad: dict[int, BadStep] = {}
        """The first of the steps in a row that an optimizer has skipped up to now, by the optimizer's number."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, LightningModule)
        # The module is changed in place: the strategy does not use what this method returns.
        of_norms = tensors_of_norms(module)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if tensor.dtype in HALVES and (tensor.requires_grad or tensor in of_norms):
                tensor.data = tensor.data.float()
                self._widened[name] = tensor
        self._module, self._weight_copies = module, WeightCopies(module, self.dtype)
        self._hooks = keep_norms_in_fp32(module)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise ValueError(
                "LBFGS evaluates the loss several times a step, and a step cannot be skipped after that: use another "
                "optimizer, or precision='32-true'"
            )
        wanted = self._half_kernels
        if wanted is None:
            wanted = needs_cpu_half_ops(self._module.device, self.dtype)
        self._half_ops = CpuHalfOps() if wanted else nullcontext()
        # Not of `model`, which DDP may have wrapped: names of ignored parameters are attributes of the inner module.
        self._ranks_differ = ranks_differ(self._module, optimizers)
        return super().connect(model, optimizers, lr_schedulers)

    # HalfPrecision's versions of these two contexts would create parameters, and tensors of the user, in 16 bit.
    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    module_init_context = tensor_init_context

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # Autocast's own cache is off: its copies would survive an optimizer's step that runs inside of this context.
        autocast = torch.autocast(self._module.device.type, dtype=self.dtype, cache_enabled=False)
        with self._weight_copies.active(), self._half_ops, autocast:
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        return apply_to_collection(data, Tensor, lambda t: t.to(self.dtype) if t.dtype is torch.float32 else t)

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        loss = super().pre_backward(tensor, module).float()
        self._loss = loss.detach()
        # This backward pass adds scaled gradients to those of earlier ones (accumulation), which are unscaled, and the
        # all-reduce takes the sum: so the earlier ones are scaled again.
        if self.loss_scale.value != 1 and (gradients := self._gradients(module)):
            foreach_mul_(list(gradients.values()), self.loss_scale.value)
        return loss * self.loss_scale.value

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Layers with checkpointed activations run their forward pass again in here and read copies in it.
        with self._weight_copies.active(), self._half_ops, torch.autocast(self._module.device.type, enabled=False):
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        # The hooks `on_after_backward` run in the method of the base class, and see unscaled gradients.
        self._overflow_flags = self._unscale(module)
        return super().post_backward(tensor, module)

    def _unscale(self, module: LightningModule) -> list[Tensor] | None:
        """Divides all gradients by the loss scale.

        Returns the flags of overflow of the optimizer's gradients, which decide on the next step. Returns None if other
        code may still change the gradients, or if the scale is 1 and there is nothing to divide.
        """
        factor = 1 / self.loss_scale.value
        if factor == 1:
            return None
        gradients = self._gradients(module)
        checks_later = _others_may_change_gradients(module)
        # A step does not depend on gradients of parameters that its optimizer, the only one here, does not have.
        mine = set() if checks_later else set(self.main_params(module.trainer.optimizers[0]))
        if rest := [gradient for parameter, gradient in gradients.items() if parameter not in mine]:
            foreach_mul_(rest, factor)
        if checks_later:
            return None
        return unscale([gradient for parameter, gradient in gradients.items() if parameter in mine], factor)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # The closure may end without a backward pass, and flags of an earlier one would say nothing about this step.
        self._overflow_flags = None
        result = closure()
        number = next(i for i, other in enumerate(model.trainer.optimizers) if other is optimizer)
        # Either way this waits for the device.
        if self._overflow_flags is not None:
            finite = not any_set(self._overflow_flags)
        else:
            finite = all_finite(p.grad for p in self.main_params(optimizer) if p.grad is not None)
        if self._ranks_differ:
            finite = model.trainer.strategy.reduce_boolean_decision(finite)
        if finite:
            self._after_closure(model, optimizer)
            optimizer.step(**kwargs)
            self._weight_copies.refresh()
            self._first_bad.pop(number, None)
        else:
            if number not in self._first_bad:
                self._first_bad[number] = BadStep.examine(model, optimizer)
            # A scheduler steps after a skipped step, too. If the first step is skipped, torch would warn without this
            # call that the scheduler stepped before the optimizer.
            count_as_step(optimizer)
        self.loss_scale.update(finite, number)
        self._report(model, number)
        return result

    def _report(self, model: LightningModule, optimizer: int) -> None:
        """Logs the scale; warns, and in the end raises, if lowering it does not stop the overflow."""
        scale = self.loss_scale
        if not model.trainer.barebones:
            figures = {"fourmin/loss_scale": scale.value, "fourmin/skipped_steps": float(scale.skipped_steps)}
            # In manual optimization an optimizer may step in a hook in which Lightning refuses to log.
            with suppress(MisconfigurationException):
                model.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)
        if scale.exhausted(optimizer):
            raise RuntimeError(
                f"gradients were not finite in {scale.skips_in_a_row[optimizer]} steps in a row, the first at "
                f"{self._first_bad[optimizer]}, the last with loss scale {scale.value:g}; "
                f"{losses_of_ranks(model.trainer, self._loss)}: look for bad data or a diverging loss, lower the "
                "learning rate, or try dtype='bf16' or precision='32-true'"
            )
        if scale.skips_in_a_row[optimizer] == PATIENCE // 2:
            rank_zero_warn(
                f"{PATIENCE // 2} steps in a row were skipped: their gradients are not finite; the loss scale is now "
                f"{scale.value:g}"
            )

    def _gradients(self, module: LightningModule) -> dict[nn.Parameter, Tensor]:
        """Returns the gradients of the module's parameters and of those that only optimizers have."""
        optimizers = module.trainer.optimizers
        parameters = chain(module.parameters(), *(self.main_params(optimizer) for optimizer in optimizers))
        return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Copies FP32 weights again: Lightning has loaded them, and so rounded them, while the module was 16 bit."""
        with torch.no_grad():
            for name in self._widened.keys() & checkpoint["state_dict"].keys():
                self._widened[name].copy_(checkpoint["state_dict"][name])

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.loss_scale.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loss_scale.load_state_dict(state_dict)

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._loss, self._first_bad = [], None, {}
        self._half_ops, self._widened, self._overflow_flags = nullcontext(), {}, None
        super().teardown()


def _others_may_change_gradients(module: LightningModule) -> bool:
    """Whether code of the user may run between the end of a backward pass and the decision on the step.

    Such code may clip gradients or set them to 0, and the decision must be about the gradients that it leaves: so they
    are looked at right before the step. The version counters of tensors cannot tell whether gradients were changed,
    because writing through `.data` does not change the counters. In manual optimization, several optimizers may share a
    backward pass as well, and each decides on its own gradients.
    """
    if not module.automatic_optimization or _overrides(module, LightningModule, "optimizer_step"):
        return True
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    return _overrides(module, LightningModule, "on_after_backward") or any(
        _overrides(callback, Callback, "on_after_backward") for callback in callbacks
    )


def _overrides(instance: object, base: type, method: str) -> bool:
    """Whether the class of an object, or the object itself, has its own version of a method of the base class."""
    return getattr(getattr(instance, method), "__func__", None) is not getattr(base, method)


def _loss_scale(dtype: str, loss_scale: float | str) -> LossScale:
    """Checks the argument `loss_scale` and makes the scale that it asks for."""
    if loss_scale == "dynamic":
        return LossScale(1.0, dynamic=False) if dtype == "bf16" else LossScale(INITIAL_SCALE, dynamic=True)
    if isinstance(loss_scale, str) or not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale must be 'dynamic' or a number above 0, got {loss_scale!r}")
    if dtype == "bf16":
        raise ValueError(
            f"loss_scale={loss_scale!r} with dtype='bf16': BF16 has the range of FP32 and needs no loss scale; leave "
            "loss_scale out, or use dtype='fp16'"
        )
    return LossScale(float(loss_scale), dynamic=False)
