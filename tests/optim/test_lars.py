"""LARS against a NumPy rendering of its formulas, and what an optimizer has to get right besides."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lightning_fourmin as fm
from lightning_fourmin.optim import lars as lars_module
from lightning_fourmin.optim.lars import SMALLEST_FUSED_SCALE

NUM_STEPS = 200
ALL_FORMS = [
    pytest.param(form, nesterov, id=f"{form}{'-nesterov' * nesterov}")
    for form in ("mlperf", "torch")
    for nesterov in (False, True)
]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A frozen layer, weights of several blocks, zero biases, batch norm."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 31), nn.LayerNorm(31), nn.Linear(31, 10)
    )
    for name, parameter in layers.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    layers[5].requires_grad_(False)
    return layers.to(dtype)


def warm_up_then_poly(step: int) -> float:
    warm_up = 20
    return (step + 1) / warm_up if step < warm_up else (1 - (step - warm_up) / (NUM_STEPS - warm_up)) ** 2


def gradients(parameters: list[Tensor], num_steps: int) -> list[list[Tensor]]:
    """Random ones of quite different sizes, the same in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return [
        [10.0 ** (i % 4 - 2) * torch.randn(p.shape, generator=generator).to(p) for i, p in enumerate(parameters)]
        for _ in range(num_steps)
    ]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: list[list[Tensor]], start: int = 0) -> None:
    """Steps with a closure whose backward makes the given gradients, and a schedule."""
    parameters = list(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_poly, last_epoch=start - 1)
    for step in steps:

        def closure(step: list[Tensor] = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([(p * g).sum() for p, g in zip(parameters, step, strict=True)]).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()


def reference(
    module: nn.Module, steps: list[list[Tensor]], base_lr: float, decay: float, form: str, nesterov: bool
) -> list[np.ndarray]:
    """LARS from its formulas in FP64, tensor by tensor; with tensors of one dimension as biases and norms."""
    momentum, eta, eps = 0.9, 0.001, 1e-7
    trained = [p.requires_grad for p in module.parameters()]
    w = [p.detach().double().numpy().copy() for p in module.parameters()]
    v = [np.zeros_like(x) for x in w]
    for t, step in enumerate(steps):
        lr = base_lr * warm_up_then_poly(t)
        for i in (i for i, is_trained in enumerate(trained) if is_trained):
            g = step[i].double().numpy()
            lam = 1.0
            if w[i].ndim > 1:
                w_norm, g_norm = np.sqrt((w[i] ** 2).sum()), np.sqrt((g**2).sum())
                if w_norm > 0 and g_norm > 0:
                    lam = eta * w_norm / (g_norm + decay * w_norm + eps)
                g = g + decay * w[i]
            inside, outside = (lr * lam, 1.0) if form == "mlperf" else (lam, lr)
            v[i] = momentum * v[i] + inside * g
            w[i] = w[i] - outside * (inside * g + momentum * v[i] if nesterov else v[i])
    return w


def assert_close(found: list[Tensor], expected: list[np.ndarray], tolerance: float) -> None:
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            f.detach().double().numpy(), e, rtol=tolerance, atol=tolerance * np.abs(e).max(initial=0.0)
        )


@pytest.mark.parametrize(("form", "nesterov"), ALL_FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", ["fused", "no fused kernel"])
def test_golden(monkeypatch: pytest.MonkeyPatch, form: Any, nesterov: bool, dtype: torch.dtype, kernel: str) -> None:
    if kernel != "fused":
        monkeypatch.setattr(lars_module, "fused_sgd_", None)
    module, lr, decay = net(dtype), 8.0, 1e-2
    steps = gradients(list(module.parameters()), NUM_STEPS)
    start = [p.detach().clone() for p in module.parameters()]
    expected = reference(module, steps, lr, decay, form, nesterov)
    train(module, fm.LARS(fm.param_groups(module, decay), lr, form=form, nesterov=nesterov), steps)
    for parameter, before in zip(module.parameters(), start, strict=True):
        assert torch.equal(parameter, before) != parameter.requires_grad
    assert_close(list(module.parameters()), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("nesterov", [False, True])
def test_torch_form_is_that_of_pytorch_optimizer(nesterov: bool) -> None:
    ours, other = net(torch.float64), net(torch.float64)
    steps = gradients(list(ours.parameters()), 50)
    # The other one has no eps; it knows biases and norms by their one dimension.
    groups = fm.param_groups(ours, 1e-2)
    train(ours, fm.LARS(groups, 0.5, eps=1e-300, form="torch", nesterov=nesterov), steps)
    train(other, pytorch_optimizer.LARS(other.parameters(), 0.5, weight_decay=1e-2, nesterov=nesterov), steps)
    assert_close(list(ours.parameters()), [p.detach().numpy() for p in other.parameters()], 1e-12)


@pytest.mark.parametrize(
    ("dtype", "nesterov", "num_calls"), [(torch.float32, False, 3), (torch.float32, True, 0), (torch.float64, False, 0)]
)
def test_fused_kernel_runs_where_it_is_right(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, nesterov: bool, num_calls: int
) -> None:
    """Once for each weight, once for all biases and norms."""
    kernel, calls = torch._fused_sgd_, []

    def counted(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(params))
        kernel(params, *args, **kwargs)

    monkeypatch.setattr(lars_module, "fused_sgd_", counted)
    module = net(dtype)
    optimizer = fm.LARS(fm.param_groups(module, 1e-2), 1.0, nesterov=nesterov)
    train(module, optimizer, gradients(list(module.parameters()), 1))
    assert len(calls) == num_calls
    assert sum(calls) in (0, sum(parameter.requires_grad for parameter in module.parameters()))


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    zero=st.sampled_from(["", "weights", "gradient", "both"]),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    coefficient=st.sampled_from([None, 0.001]),
    lr=st.sampled_from([0.0, 1e-12, 0.5, 30.0]),
    form=st.sampled_from(["mlperf", "torch"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_two_steps_of_any_tensor(
    shape: list[int],
    zero: str,
    momentum: float,
    decay: float,
    coefficient: float | None,
    lr: float,
    form: Any,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(shape, generator=generator, dtype=dtype) * (zero not in ("weights", "both"))
    g = torch.randn(shape, generator=generator, dtype=dtype) * (zero not in ("gradient", "both"))
    parameter = nn.Parameter(w.clone())
    optimizer = fm.LARS([parameter], lr, momentum, decay, coefficient, form=form)
    expected, v, ratio = w.double().numpy(), np.zeros(shape), 1.0
    size = 1.0
    for _ in range(2):
        parameter.grad = g.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, g), "the gradient is the user's"
        w_norm, g_norm = np.sqrt((expected**2).sum()), float(g.double().pow(2).sum().sqrt())
        ratio = 1.0
        if coefficient is not None and w_norm > 0 and g_norm > 0:
            ratio = coefficient * w_norm / (g_norm + decay * w_norm + 1e-7)
        direction = g.double().numpy() + decay * expected
        v = momentum * v + (lr if form == "mlperf" else 1.0) * ratio * direction
        expected = expected - (1.0 if form == "mlperf" else lr) * v
        # At a rate of 30 the steps are far larger than what they add up to: rounding is relative to them.
        size = max(size, np.abs(expected).max(initial=0.0), lr * np.abs(direction).max(initial=0.0))
        assert optimizer.trust_ratios() == (
            {} if coefficient is None else {"group0.param0": pytest.approx(ratio, rel=1e-6)}
        )
    found = parameter.detach().double().numpy()
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=4 * TOLERANCE[dtype] * size)
    if momentum:
        # Not relative to the weights: a tiny update counts as well.
        buffer = optimizer.state[parameter]["momentum_buffer"]
        np.testing.assert_allclose(buffer.double().numpy(), v, rtol=1e-5, atol=1e-5 * np.abs(v).max(initial=0.0))


def test_the_smallest_updates_are_not_lost() -> None:
    parameter = nn.Parameter(torch.zeros(3, 3))
    parameter.grad = torch.full((3, 3), 1e6)
    optimizer = fm.LARS([parameter], lr=SMALLEST_FUSED_SCALE * 1e-9)
    optimizer.step()
    np.testing.assert_allclose(parameter.detach().numpy(), -1e6 * SMALLEST_FUSED_SCALE * 1e-9, rtol=1e-6)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1, :1, :1, :1].expand(t.shape),
}


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_weights", ["contiguous", "channels last", "transposed", "every second"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_any_layout(of_weights: str, of_gradient: str, momentum: float, nesterov: bool) -> None:
    torch.manual_seed(3)
    w, g = torch.randn(6, 20, 5, 4), torch.randn(6, 20, 5, 4)
    g = LAYOUTS[of_gradient](g)
    answers = []
    for weights, gradient in ((w.clone(), g.contiguous()), (LAYOUTS[of_weights](w.clone()), g)):
        parameter = nn.Parameter(weights)
        optimizer = fm.LARS([parameter], 0.5, momentum, weight_decay=0.1, nesterov=nesterov)
        for _ in range(3):
            parameter.grad = gradient
            optimizer.step()
        answers.append(parameter.detach())
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(answers[0], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_16_bit_parameters_get_their_ratio_in_fp32(dtype: torch.dtype, momentum: float) -> None:
    w, g = torch.full((100, 100), 2.0, dtype=dtype), torch.full((100, 100), 4e4, dtype=dtype)
    parameter = nn.Parameter(w.clone())
    parameter.grad = g
    optimizer = fm.LARS([parameter], 10.0, momentum)
    optimizer.step()
    ratio = 0.001 * 200 / float(100 * g.float()[0, 0])
    assert optimizer.trust_ratios()["group0.param0"] == pytest.approx(ratio, rel=1e-5)
    expected = 2.0 - 10.0 * ratio * float(g[0, 0])
    torch.testing.assert_close(parameter.detach(), torch.full_like(w, expected), rtol=0.003, atol=0)
    assert parameter.dtype == dtype
    assert expected < 1.99


def test_no_value_is_read_back_from_a_device() -> None:
    """Tensors without values stand for a GPU: reading one raises."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in ((4, 3), (7,), ())]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "trust_coefficient": None}]
    for form, nesterov in (("mlperf", False), ("torch", True)):
        optimizer = fm.LARS(groups, 0.1, weight_decay=0.1, form=form, nesterov=nesterov)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        assert optimizer.state[parameters[0]]["momentum_buffer"].shape == (4, 3)
        with pytest.raises((RuntimeError, NotImplementedError)):
            optimizer.trust_ratios()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_weights_of_cpu_without_a_sync() -> None:
    on_cpu, on_cuda = net(), net().cuda()
    optimizers = [fm.LARS(fm.param_groups(module, 1e-2), 1.0) for module in (on_cpu, on_cuda)]
    for step in gradients(list(on_cpu.parameters()), 5):
        for module, optimizer in zip((on_cpu, on_cuda), optimizers, strict=True):
            for parameter, gradient in zip(module.parameters(), step, strict=True):
                parameter.grad = gradient.to(parameter.device) if parameter.requires_grad else None
            torch.cuda.set_sync_debug_mode("error" if module is on_cuda else "default")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
    assert_close([p.cpu() for p in on_cuda.parameters()], [p.detach().numpy() for p in on_cpu.parameters()], 1e-5)


@pytest.mark.parametrize(("form", "nesterov"), ALL_FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_state_dict_round_trip_is_exact(form: Any, nesterov: bool, dtype: torch.dtype) -> None:
    at_once, first = net(dtype), net(dtype)
    steps = gradients(list(at_once.parameters()), 30)
    train(at_once, fm.LARS(fm.param_groups(at_once, 1e-2), 2.0, form=form, nesterov=nesterov), steps)
    optimizer = fm.LARS(fm.param_groups(first, 1e-2), 2.0, form=form, nesterov=nesterov)
    train(first, optimizer, steps[:10])
    second = net(dtype)
    second.load_state_dict(first.state_dict())
    # Form, Nesterov and the group without a ratio come with the state.
    resumed = fm.LARS(fm.param_groups(second, 0.0), 1.0)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert resumed.param_groups[1]["trust_coefficient"] is None
    train(second, resumed, steps[10:], start=10)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), at_once.parameters(), strict=True))


def test_a_copy_goes_on_alike() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2)
    optimizer = fm.LARS([parameter], 1.0)
    optimizer.step()
    clone = copy.deepcopy(optimizer)
    (copied,) = clone.param_groups[0]["params"]
    assert clone.trust_ratios() == {}
    copied.grad = torch.ones(3, 2)
    optimizer.step()
    clone.step()
    assert torch.equal(copied, parameter)
    assert clone.trust_ratios() == optimizer.trust_ratios()


def test_parameters_without_gradient_are_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = fm.LARS([("used", used), ("unused", unused)], 1.0, weight_decay=0.1)
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert unused not in optimizer.state
    assert optimizer.trust_ratios() == {"used": pytest.approx(0.001 * 2 / (2 + 0.1 * 2 + 1e-7))}


def test_no_momentum_has_no_state() -> None:
    module = net()
    optimizer = fm.LARS(module.parameters(), 1.0, momentum=0.0)
    train(module, optimizer, gradients(list(module.parameters()), 2))
    assert optimizer.state_dict()["state"] == {}


def test_autograd_notices_the_update() -> None:
    layer = nn.Linear(3, 3)
    optimizer = fm.LARS(layer.parameters(), 1.0)
    output = layer(torch.ones(2, 3, requires_grad=True)).sum()
    output.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_closure_runs_once_with_gradients_and_its_loss_is_returned() -> None:
    parameter = nn.Parameter(torch.ones(2))
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = parameter.pow(2).sum()
        loss.backward()
        return loss

    assert fm.LARS([parameter], 1.0).step(closure).item() == 2.0
    assert calls == [True]


def test_added_groups_keep_their_options() -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = fm.LARS([first], 1.0)
    optimizer.add_param_group({"params": [second], "trust_coefficient": None, "lr": 0.5})
    first.grad, second.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(second, torch.full((2, 2), 0.5))
    assert optimizer.trust_ratios().keys() == {"group0.param0"}


def test_sparse_gradients_are_refused() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    optimizer = fm.LARS(layer.named_parameters(), 1.0)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"^weight has a sparse gradient, .* build its layer with sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr of param group 0 must be a finite number of at least 0, got -1.0"),
        ({"lr": float("nan")}, "lr of param group 0 must be a finite number of at least 0, got nan"),
        ({"lr": torch.tensor(1.0)}, r"lr of param group 0 must be a finite number of at least 0, got tensor\(1.\)"),
        ({"momentum": -0.1}, "momentum of param group 0 must be a finite number of at least 0"),
        ({"momentum": 1.0}, "momentum of param group 0 must be below 1, got 1.0"),
        ({"weight_decay": -1}, "weight_decay of param group 0 must be a finite number of at least 0"),
        ({"eps": 0.0}, "eps of param group 0 must be above 0: the MLPerf reference, given 0, takes 1e-7"),
        ({"trust_coefficient": 0}, "trust_coefficient of param group 0 must be above 0, or None for no trust ratio"),
        ({"form": "apex"}, "form of param group 0 must be one of 'mlperf', 'torch', got 'apex'"),
        ({"nesterov": True, "momentum": 0}, "nesterov of param group 0 needs a momentum above 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fm.LARS([nn.Parameter(torch.ones(1))], **{"lr": 1.0} | options)


def test_wrong_options_of_a_group_name_the_group() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = fm.LARS([first], 1.0)
    with pytest.raises(ValueError, match="weight_decay of param group 1 must be"):
        optimizer.add_param_group({"params": [second], "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1
