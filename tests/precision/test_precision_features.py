"""FourMinPrecision with what users and callbacks do in training: as in FP32, up to rounding."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_fourmin import FourMinPrecision
from tests.support.half_training import Net, fit, images, seeded, state, trainer, weights


class Gradients(Callback):
    """Keeps a copy of the gradients at each hook."""

    def __init__(self) -> None:
        self.after_backward: list[Tensor] = []
        self.before_step: list[Tensor] = []
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after_backward.append(self._collect(pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.before_step.append(self._collect(pl_module))

    @staticmethod
    def _collect(module: LightningModule) -> Tensor:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        assert {g.dtype for g in gradients} == {torch.float32}
        return torch.cat([g.flatten() for g in gradients]).clone()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_see_what_fp32_training_shows(accumulate: int) -> None:
    seen, expected = Gradients(), Gradients()
    fit(seeded(), FourMinPrecision(), num_batches=2, callbacks=[seen], accumulate_grad_batches=accumulate)
    fit(seeded(), None, num_batches=2, callbacks=[expected], accumulate_grad_batches=accumulate)
    assert seen.losses == pytest.approx(expected.losses, rel=1e-2)
    for hook in ("after_backward", "before_step"):
        found, reference = getattr(seen, hook), getattr(expected, hook)
        assert len(found) == len(reference)
        for f, r in zip(found, reference, strict=True):
            assert (f - r).norm() < 2e-2 * r.norm()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_unscaled(algorithm: str) -> None:
    nets = [seeded(), seeded()]
    for net, precision in zip(nets, (FourMinPrecision(), None), strict=True):
        fit(net, precision, gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm)
    start = weights(seeded())
    found, expected = (weights(net) - start for net in nets)
    assert (found - expected).norm() < 5e-2 * expected.norm()


class TwoOptimizers(Net):
    """Both backward passes first, then both steps, the second every other batch; clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        self.clip_gradients(first, 0.01, "norm")
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        rest = [*self.norm.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(self.conv.parameters(), lr=0.1), torch.optim.Adam(rest, lr=0.01)]


def test_scale_may_change_between_backward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that doubles after every step of either optimizer trains in every bit as a constant one."""
    constant, changing = seeded(TwoOptimizers), seeded(TwoOptimizers)
    fit(constant, FourMinPrecision(loss_scale=64))
    monkeypatch.setattr("lightning_fourmin.precision.loss_scale.GROWTH_INTERVAL", 1)
    monkeypatch.setattr("lightning_fourmin.precision.plugin.INITIAL_SCALE", 64.0)
    precision = FourMinPrecision()
    fit(changing, precision)
    assert precision.loss_scale.value == 64 * 2**6
    assert torch.equal(state(changing), state(constant))


class InTurns(Net):
    """Manual optimization with toggled optimizers, as GANs do it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        rest = [*self.norm.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(self.conv.parameters(), lr=0.1), torch.optim.SGD(rest, lr=0.1)]


class LookAtCopies(Callback):
    """Before each backward pass: what the forward pass used were copies of the newest weights, toggled as those are."""

    num_looks = 0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        for name, master in pl_module.named_parameters():
            layer, _, kind = name.partition(".")
            used = getattr(getattr(pl_module, layer), kind)
            assert torch.equal(used, master if layer == "norm" else master.half())
            assert used.requires_grad == master.requires_grad
        assert pl_module.conv.weight.requires_grad != pl_module.head.weight.requires_grad
        self.num_looks += 1


def test_copies_follow_optimizers() -> None:
    look = LookAtCopies()
    fit(seeded(InTurns), FourMinPrecision(), callbacks=[look])
    assert look.num_looks == 8


def check_close_to_fp32(net_type: type[LightningModule], *callbacks: Callback, max_epochs: int = 1) -> None:
    """The update differs by FP16's rounding only."""
    nets = [seeded(net_type), seeded(net_type)]
    start = weights(nets[0])
    # A scale low enough that no step is skipped.
    for net, precision in zip(nets, (FourMinPrecision(loss_scale=1024), None), strict=True):
        fit(net, precision, num_batches=3, callbacks=copy.deepcopy(list(callbacks)), max_epochs=max_epochs)
    found, expected = (weights(net) - start for net in nets)
    assert (found - expected).norm() < 5e-2 * expected.norm()


class Freeze(Callback):
    """Freezes the convolution after the first batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.conv.requires_grad_(False)


class Regularised(Net):
    """A penalty on all parameters, which has to be computed in FP32: 300 squared is beyond FP16."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = sum((300 * p).pow(2).sum() for p in self.parameters())
        assert isinstance(penalty, Tensor)
        assert penalty.dtype is torch.float32
        return super().training_step(batch, batch_idx) + 1e-6 * penalty


class Checkpointed(Net):
    """Computes activations again in the backward pass."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = checkpoint(self.conv, images, use_reentrant=False)
        return self.head(torch.relu(self.norm(hidden)).flatten(1))


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


class Sequence(Net):
    """A recurrent layer, whose weights torch keeps in a list as well, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.LSTM(18, 8, batch_first=True)
        self.norm = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8 * 6, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(images.flatten(2).view(-1, 6, 18))[0]).flatten(1))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class Parametrized(Net):
    """Weights that are computed from others, with buffers in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.spectral_norm(self.conv)
        self.head = nn.utils.parametrizations.weight_norm(self.head)


@pytest.mark.parametrize(
    "net_type", [InTurns, TwoOptimizers, Regularised, Checkpointed, Scheduled, Sequence, Parametrized]
)
def test_trains_as_in_fp32(net_type: type[LightningModule]) -> None:
    check_close_to_fp32(net_type)


@pytest.mark.parametrize(
    "callback",
    [
        Freeze(),
        EMAWeightAveraging(decay=0.8),
        StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_as_in_fp32(callback: Callback) -> None:
    check_close_to_fp32(Net, callback, max_epochs=3)


def test_recurrent_and_attention_layers_predict_as_in_fp32() -> None:
    (found,), (expected,) = (
        trainer(precision).predict(seeded(Sequence), images(1)) for precision in (FourMinPrecision(), None)
    )  # type: ignore[misc]
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
