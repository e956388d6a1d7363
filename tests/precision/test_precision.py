"""FourMinPrecision in one process: against rounding by hand, how it is chosen, and what steps see."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_fourmin import FourMinPrecision, FourMinStrategy
from lightning_fourmin.precision.cpu_half_ops import CpuHalfOps
from tests.support.half_training import Net, fit, images, loss_by_hand, seeded, state, trainer, weights

DTYPES = pytest.mark.parametrize("dtype", ["fp16", "bf16"])
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


def train_by_hand(num_batches: int, dtype: torch.dtype, scale: float) -> Tensor:
    """All in FP32, with every rounding of 16-bit training written out."""
    net = seeded()
    optimizer = net.configure_optimizers()
    for batch in images(num_batches):
        optimizer.zero_grad()
        (loss_by_hand(net, batch, dtype) * scale).backward()
        for parameter in net.parameters():
            parameter.grad /= scale
        optimizer.step()
    return state(net)


@DTYPES
def test_equal_to_rounding_by_hand(dtype: str) -> None:
    net, precision = seeded(), FourMinPrecision(dtype)
    expected = train_by_hand(4, TORCH[dtype], precision.loss_scale.value)
    fit(net, precision)
    assert torch.equal(state(net), expected)
    assert {t.dtype for t in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("flag", ["16-true", "bf16-true"])
@pytest.mark.parametrize("strategy", ["fourmin", FourMinStrategy])
def test_flag_picks_the_plugin(flag: Any, strategy: Any) -> None:
    run = Trainer(
        strategy=strategy if strategy == "fourmin" else strategy(), precision=flag, accelerator="cpu", logger=False
    )
    assert isinstance(run.precision_plugin, FourMinPrecision)
    dtype = torch.float16 if flag == "16-true" else torch.bfloat16
    assert run.precision_plugin.dtype is dtype
    assert run.precision == flag
    assert _plugin_to_compute_dtype(run.precision_plugin) is dtype
    assert isinstance(run.strategy, FourMinStrategy)
    assert run.strategy.wire_dtype is dtype
    with run.init_module():
        assert nn.Linear(2, 2).weight.dtype is torch.float32


def test_own_plugin_and_wire_are_kept() -> None:
    own = FourMinPrecision(loss_scale=8)
    run = Trainer(strategy=FourMinStrategy(wire_dtype="fp32"), plugins=[own], accelerator="cpu", logger=False)
    assert run.precision_plugin is own
    assert run.strategy.wire_dtype is torch.float32  # type: ignore[attr-defined]
    plain = Trainer(strategy="fourmin", accelerator="cpu", logger=False)
    assert plain.strategy.wire_dtype is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": "fp8"}, "dtype='fp8' is not known: choose one of 'fp16', 'bf16'"),
        ({"loss_scale": "static"}, "loss_scale must be 'dynamic' or a number above 0, got 'static'"),
        ({"loss_scale": 0}, "loss_scale must be 'dynamic' or a number above 0, got 0"),
        ({"loss_scale": float("inf")}, "loss_scale must be 'dynamic' or a number above 0, got inf"),
        ({"dtype": "bf16", "loss_scale": 128}, "BF16 has the range of FP32 and needs no loss scale; leave loss_scale"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FourMinPrecision(**arguments)


class WithLBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@DTYPES
def test_lbfgs_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"LBFGS evaluates the loss several times a step.*use another optimizer"):
        fit(WithLBFGS(), FourMinPrecision(dtype))


class OwnNorm(nn.LayerNorm):
    """A norm layer with arithmetic of its own; squares beyond 256 overflow in FP16."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        x = 1000 * x
        return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight


class Inside(Net):
    """Looks around in every kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(8 * 16, 5, bias=False)
        self.tied.weight = self.head.weight
        self.norms = nn.Sequential(nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.RMSNorm(5), OwnNorm(5))
        self.register_buffer("offset", torch.ones(5))
        self.seen: list[str] = []

    def look(self, images: Tensor) -> Tensor:
        assert images.dtype is self.head.weight.dtype is self.conv(images).dtype is torch.float16
        assert {p.dtype for p in self.parameters()} == {torch.float32}
        assert self.head.weight is self.head.weight is self.tied.weight
        assert self.head.weight.requires_grad == torch.is_grad_enabled()
        assert self.norm.weight.dtype is self.norm.running_mean.dtype is self.offset.dtype is torch.float32
        assert self.norm(self.conv(images)).dtype is torch.float16
        # FP32 constants and tensors made in the step mix with 16-bit weights.
        logits = self(images) + self.offset + torch.zeros(5)
        assert logits.dtype is torch.float32
        logits = self.norms(logits)
        assert logits.dtype is torch.float16
        assert logits.isfinite().all()
        copied = copy.deepcopy(self.head)
        assert copied.weight.dtype is torch.float32
        assert copied.weight.is_leaf
        self.seen.append(self.trainer.state.stage.value)  # type: ignore[union-attr]
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.look(batch[0])
        loss = F.cross_entropy(self.look(batch[0]), batch[1])
        assert loss.dtype is torch.float32
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.look(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.look(batch[0])


def test_what_steps_see() -> None:
    net = seeded(Inside)
    run = trainer(FourMinPrecision())
    run.fit(net, images(2), images(1))
    run.validate(net, images(1), verbose=False)
    run.test(net, images(1), verbose=False)
    run.predict(net, images(1))
    assert set(net.seen) == {"sanity_check", "train", "validate", "test", "predict"}
    assert type(net.head._parameters) is dict
    assert not net.norm._forward_hooks
    assert net(next(iter(images(1)))[0]).dtype is torch.float32


def test_double_stays_double() -> None:
    batch = {"x": torch.zeros(2), "far": torch.full((2,), 1e6, dtype=torch.float64), "label": torch.arange(2)}
    found = FourMinPrecision().convert_input(batch)
    assert [t.dtype for t in found.values()] == [torch.float16, torch.float64, torch.int64]


class DoubleNorm(Net):
    """Ends with a norm in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(5).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.last(self(batch[0]).double())
        assert logits.dtype is torch.float64
        return F.cross_entropy(logits, batch[1])


class Functional(Net):
    """Calls a layer with other weights on its way."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        masters = dict(self.head.named_parameters())
        others = {name: 0.5 * master for name, master in masters.items()}
        out = torch.func.functional_call(self.head, others, (torch.ones(1, 8 * 16),))
        assert out.dtype is torch.float16
        assert all(found is masters[name] for name, found in self.head.named_parameters())
        return super().training_step(batch, batch_idx)


def test_functional_calls_leave_the_masters_in_place() -> None:
    nets = [seeded(Functional), seeded()]
    for net in nets:
        fit(net, FourMinPrecision())
    assert torch.equal(*map(state, nets))


def test_norms_in_float64_stay_so() -> None:
    net = seeded(DoubleNorm)
    before = weights(net)
    fit(net, FourMinPrecision())
    assert net.last.weight.dtype is torch.float64
    assert not torch.equal(weights(net), before)


class Compiled(Net):
    """The inner net compiled; `self.log` and the loss stay outside."""

    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(self.conv, self.norm, nn.ReLU(), nn.Flatten(), self.head)
        self.compiled = torch.compile(inner, backend=self.backend)

    def forward(self, images: Tensor) -> Tensor:
        return self.compiled(images)


@pytest.mark.parametrize("half_kernels", [True, False])
def test_inner_net_can_be_compiled(half_kernels: bool) -> None:
    torch._dynamo.reset()
    nets = [seeded(Compiled), seeded()]
    for net in nets:
        torch.manual_seed(3)
        fit(net, FourMinPrecision(half_kernels=half_kernels))
    found, expected = map(weights, nets)
    assert (found - expected).norm() < 1e-2 * (expected - weights(seeded())).norm()


class Counted(Compiled):
    """Compiled by something that counts its graphs."""

    backend = CompileCounterWithBackend("aot_eager")


def test_compiled_net_is_one_graph() -> None:
    torch._dynamo.reset()
    fit(seeded(Counted), FourMinPrecision(half_kernels=False))
    assert Counted.backend.frame_count == 1


class Outside(Net):
    """A weight that the optimizer knows and the module does not."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = [nn.Parameter(torch.ones(5))]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).float() * self.outside[0], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.outside], lr=0.05)


def test_parameters_outside_of_the_module_are_unscaled() -> None:
    nets = [seeded(Outside), seeded(Outside)]
    for net, precision in zip(nets, (FourMinPrecision(), None), strict=True):
        fit(net, precision)
    found, expected = (net.outside[0].detach() for net in nets)
    assert (found - expected).norm() < 1e-2 * (expected - 1).norm()


class SharedOutside(Outside):
    """Two optimizers have the weight that the module does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.outside, lr=0.05), torch.optim.SGD([*self.parameters(), *self.outside], lr=0.05)]


def test_gradients_that_two_optimizers_share_are_unscaled_once() -> None:
    nets = [seeded(SharedOutside), seeded(SharedOutside)]
    for net, precision in zip(nets, (FourMinPrecision(), None), strict=True):
        fit(net, precision, num_batches=2)
    found, expected = (net.outside[0].grad for net in nets)
    assert (found - expected).norm() < 1e-2 * expected.norm()


class FromIterator(Net):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class AfterEpoch(Net):
    """Steps where Lightning logs no steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))

    def on_train_epoch_end(self) -> None:
        self.optimizers().step()


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("kind", [FromIterator, AfterEpoch])
def test_modules_that_lightning_would_not_log_from_in_the_usual_way(kind: type[Net]) -> None:
    net = seeded(kind)
    before = weights(net)
    fit(net, FourMinPrecision())
    assert not torch.equal(weights(net), before)


class Watched(Net):
    """Keeps which modes its steps run in."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.modes = _get_current_dispatch_mode_stack()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("wanted", [None, False])
def test_fp16_products_are_in_fp32_on_every_cpu_unless_told_otherwise(wanted: bool | None) -> None:
    net = seeded(Watched)
    fit(net, FourMinPrecision(half_kernels=wanted), num_batches=1)
    assert [type(mode) for mode in net.modes] == ([CpuHalfOps] if wanted is None else [])
