"""Gradients that are not finite: found in the pass that unscales them, or behind it where others may change them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fourmin import FourMinPrecision
from lightning_fourmin.precision.loss_scale import INITIAL_SCALE
from lightning_fourmin.precision.overflow import all_finite, any_set, unscale
from tests.support.half_training import Net, fit, images, loss_by_hand, seeded, state

INF, NAN = float("inf"), float("nan")
NUM_BATCHES = 8
BAD_BATCHES = (1, 2, 7)
NO_POWER_OF_TWO = 1000 / 3
SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
GRADIENTS: dict[str, Tensor] = {
    "float32": torch.tensor([1.0, -2.0, 1e-40]),
    "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "float64": torch.tensor([1.0, 1 / 3], dtype=torch.float64),
    "float16": torch.tensor([1.0, 1 / 3], dtype=torch.float16),
    "complex": torch.tensor([1.0, complex(2.0, 3.0)]),
    "sparse": SPARSE,
}


@pytest.mark.parametrize("factor", [2.0**-16, 1 / NO_POWER_OF_TWO, 1.0, NO_POWER_OF_TWO])
def test_gradients_of_any_kind_are_multiplied_as_torch_does(factor: float) -> None:
    gradients = [gradient.clone() for gradient in GRADIENTS.values()]
    assert not any_set(unscale(gradients, factor))
    for found, before in zip(gradients, GRADIENTS.values(), strict=True):
        assert torch.equal(found.to_dense(), (before * factor).to_dense())


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("factor", [2.0**-16, 1.0, 2.0])
def test_a_value_that_is_not_finite_is_found_in_gradients_of_any_kind(kind: str, value: float, factor: float) -> None:
    bad = GRADIENTS[kind].clone()
    (bad._values() if bad.is_sparse else bad)[..., -1] = value
    gradients = [torch.ones(2), bad, torch.ones(2, dtype=torch.float64)]
    assert any_set(unscale(gradients, factor))
    assert not all_finite(gradients)


def test_what_a_factor_above_1_makes_overflow_is_found() -> None:
    assert any_set(unscale([torch.tensor([1e38])], 10.0))
    assert not any_set(unscale([torch.tensor([1e38])], 1.0))


def test_no_gradients_are_finite() -> None:
    assert unscale([], 0.5) == []
    assert all_finite([])


def test_devices_have_flags_of_their_own_and_nothing_is_read_back() -> None:
    """Tensors without values stand for a GPU: reading one raises."""
    here, there = unscale([torch.empty(3, device="meta"), torch.tensor([INF])], 0.5)
    assert (here.device.type, there.device.type) == ("meta", "cpu")
    assert any_set([there])
    with pytest.raises(RuntimeError):
        any_set([here])


class Overflow(Net):
    """The loss of some batches is not finite."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * INF if batch_idx in BAD_BATCHES else loss


def train_by_hand(dtype: torch.dtype, scale: float, dynamic: bool, num_accumulated: int) -> tuple[Tensor, int]:
    """The state and the steps that were skipped: unscales after every backward pass, and looks before each step."""
    net, num_skipped = seeded(), 0
    optimizer = net.configure_optimizers()
    for i, batch in enumerate(images(NUM_BATCHES)):
        if i % num_accumulated == 0:
            optimizer.zero_grad()
        for parameter in net.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * scale
        loss = loss_by_hand(net, batch, dtype) * (INF if i in BAD_BATCHES else 1.0) / num_accumulated
        (loss * scale).backward()
        for parameter in net.parameters():
            parameter.grad *= 1 / scale
        if (i + 1) % num_accumulated:
            continue
        if all(bool(parameter.grad.isfinite().all()) for parameter in net.parameters()):
            optimizer.step()
        else:
            num_skipped += 1
            scale = scale / 2 if dynamic else scale
    return state(net), num_skipped


class LooksOn(Callback):
    """A hook that runs between backward and step, and changes nothing."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


@pytest.mark.parametrize("callbacks", [[], [LooksOn()]], ids=["one pass", "two passes"])
@pytest.mark.parametrize("num_accumulated", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "scale"),
    [
        ({}, INITIAL_SCALE),
        ({"loss_scale": NO_POWER_OF_TWO}, NO_POWER_OF_TWO),
        ({"loss_scale": 0.25}, 0.25),
        ({"dtype": "bf16"}, 1.0),
    ],
    ids=str,
)
def test_trains_as_with_a_look_before_each_step(
    arguments: dict[str, Any], scale: float, num_accumulated: int, callbacks: list[Callback]
) -> None:
    precision, net = FourMinPrecision(**arguments), seeded(Overflow)
    fit(net, precision, NUM_BATCHES, accumulate_grad_batches=num_accumulated, callbacks=callbacks)
    expected, num_skipped = train_by_hand(precision.dtype, scale, not arguments, num_accumulated)
    assert precision.loss_scale.skipped_steps == num_skipped == 3
    assert torch.equal(state(net), expected)


class Counted(TorchDispatchMode):
    """Counts operations by name, and the tensors of their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tensors: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], list | tuple):
            self.num_tensors[func.overloadpacket.__name__] += len(args[0])
        return func(*args, **kwargs or {})


class OwnStep(Net):
    """Calls the optimizer's step itself, as one does to change rates."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("kind", "callbacks", "num_passes"), [(Net, [], (1, 0)), (Net, [LooksOn()], (1, 1)), (OwnStep, [], (1, 1))]
)
def test_gradients_are_read_once_where_nobody_may_change_them(
    kind: type[Net], callbacks: list[Callback], num_passes: tuple[int, int]
) -> None:
    net, counted = seeded(kind), Counted()
    with counted:
        fit(net, FourMinPrecision(), 3, callbacks=callbacks)
    num_gradients = 3 * len(list(net.parameters()))
    passes = ("_amp_foreach_non_finite_check_and_unscale_", "_foreach_mul_")
    assert tuple(counted.num_tensors[name] / num_gradients for name in passes) == num_passes


def mend(gradient: Tensor) -> None:
    torch.nan_to_num_(gradient, 0.0, 0.0, 0.0)


def mend_data(gradient: Tensor) -> None:
    gradient.data.nan_to_num_(0.0, 0.0, 0.0)


class Changed(Net):
    """Changes gradients between backward and step."""

    change: Callable[[Tensor], Any]

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            type(self).change(parameter.grad)


class MendsAfterBackward(Changed, Overflow):
    change = mend


class MendsDataAfterBackward(Changed, Overflow):
    change = mend_data


class MendsInClosure(Overflow):
    """Changes gradients behind Lightning's own closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            for parameter in self.parameters():
                mend(parameter.grad)  # type: ignore[arg-type]
            return loss

        optimizer.step(closure=closure)


class SpoilsAfterBackward(Changed):
    """Only every other step."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step % 2:
            super().on_after_backward()

    @staticmethod
    def change(gradient: Tensor) -> None:
        gradient.data.fill_(NAN)


@pytest.mark.parametrize(
    ("kind", "num_skipped"),
    [(MendsAfterBackward, 0), (MendsDataAfterBackward, 0), (MendsInClosure, 0), (SpoilsAfterBackward, 4)],
)
def test_the_decision_is_about_what_hooks_leave(kind: type[Net], num_skipped: int) -> None:
    net, precision = seeded(kind), FourMinPrecision()
    fit(net, precision, NUM_BATCHES)
    assert precision.loss_scale.skipped_steps == num_skipped
    assert state(net).isfinite().all()


class DropsBadBatches(Overflow):
    """Of the two batches of the second step the first overflows and is dropped, the second has no loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.zero_grad()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_does_not_see_the_overflow_of_gradients_that_are_gone() -> None:
    precision = FourMinPrecision()
    fit(seeded(DropsBadBatches), precision, NUM_BATCHES, accumulate_grad_batches=2)
    assert precision.loss_scale.skipped_steps == len(BAD_BATCHES) - 1


def spoiled(parameter: nn.Parameter, when: Callable[[], bool]) -> None:
    """Makes the gradients of a parameter infinite on their way, at times."""
    parameter.register_hook(lambda gradient: gradient * INF if when() else gradient)


class BadElsewhere(Net):
    """A parameter that no optimizer has gets gradients that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.ones(5))

    def on_fit_start(self) -> None:
        spoiled(self.free, lambda: True)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.free

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.conv.parameters(), *self.head.parameters()], lr=0.05)


def test_gradients_that_the_optimizer_does_not_have_do_not_count() -> None:
    net, precision = seeded(BadElsewhere), FourMinPrecision()
    before = state(net)
    fit(net, precision)
    assert precision.loss_scale.skipped_steps == 0
    assert not net.free.grad.isfinite().any()
    assert not torch.equal(state(net), before)


class TwoOptimizers(Net):
    """One backward pass for two optimizers; the gradients of one of them overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batch_idx = 0

    def on_fit_start(self) -> None:
        spoiled(self.conv.weight, lambda: self.batch_idx % 3 == 0)
        spoiled(self.head.weight, lambda: self.batch_idx % 3 == 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batch_idx = batch_idx
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        rest = [*self.norm.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(self.conv.parameters(), lr=0.1), torch.optim.Adam(rest, lr=0.01)]


def test_a_bad_gradient_of_one_optimizer_does_not_skip_the_step_of_another() -> None:
    net, precision = seeded(TwoOptimizers), FourMinPrecision(loss_scale=1024)
    fit(net, precision, NUM_BATCHES)
    by_hand = seeded(TwoOptimizers)
    optimizers = by_hand.configure_optimizers()
    for i, batch in enumerate(images(NUM_BATCHES)):
        by_hand.zero_grad()
        (loss_by_hand(by_hand, batch, torch.float16) * 1024).backward()
        for number, optimizer in enumerate(optimizers):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad /= 1024
            if i % 3 != number:
                optimizer.step()
    assert precision.loss_scale.skipped_steps == 6
    assert torch.equal(state(net), state(by_hand))
