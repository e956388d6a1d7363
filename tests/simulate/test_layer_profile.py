"""Profiles: the order of readiness, nothing touched, FLOPs and bytes by hand, and what cannot be profiled."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_fourmin.allreduce.buckets import FusionPlan
from lightning_fourmin.errors import PlanError
from lightning_fourmin.models import build_model
from lightning_fourmin.simulate.layer_profile import Profile, measure_profile
from lightning_fourmin.simulate.roofline import UPDATE_BYTES_A_PARAMETER, Device, peak_profile

ONE = Device(tflops=1e-12, memory_gb_per_s=1e9)
"""A second a FLOP; bytes are free."""
BYTES_ONLY = Device(tflops=1e9, memory_gb_per_s=1e-9)
"""A second a byte; FLOPs are free."""


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))


def check(profile: Profile, module: nn.Module) -> None:
    """Asserts what holds for any profile of a module."""
    sizes = {name: p.numel() * 4 for name, p in module.named_parameters() if p.requires_grad}
    assert {gradient.name: gradient.num_bytes for gradient in profile.gradients} == sizes
    ready = [gradient.ready_s for gradient in profile.gradients]
    assert ready == sorted(ready)
    assert 0 <= ready[0] <= ready[-1] <= profile.backward_s
    assert profile.forward_s > 0
    assert profile.samples_per_s == profile.batch_size / profile.compute_s


def test_measured_profile_has_the_gradients_of_the_fusion_plan_in_ready_order() -> None:
    module = build_model("resnet_small", 10)
    profile = measure_profile(module, torch.randn(4, 3, 8, 8), optimizer=torch.optim.SGD, repetitions=3)
    check(profile, module)
    assert profile.batch_size == 4
    assert profile.update_s > 0
    assert profile.source == "measured on cpu, n=3"
    plan = FusionPlan.build(list(module.named_parameters()), 0.01)
    assert {name for bucket in plan.buckets for name in bucket.names} == {one.name for one in profile.gradients}
    # The classifier's gradients come first, the stem's last, as DDP's reverse order of registration expects.
    assert profile.gradients[0].name.startswith("fc.")
    assert profile.gradients[-1].name == "stem.0.weight"


def test_measuring_leaves_module_and_random_state_alone() -> None:
    module, inputs = Net().eval(), torch.randn(4, 6)
    state, random_state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    measure_profile(module, inputs, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), repetitions=1)
    peak_profile(module, inputs, ONE)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not module.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_measured_on_cuda() -> None:
    module = Net().cuda()
    profile = measure_profile(module, torch.randn(4, 6, device="cuda"), optimizer=torch.optim.SGD, repetitions=3)
    check(profile, module)
    assert profile.source == "measured on cuda, n=3"


def test_flops_by_hand() -> None:
    """6 -> 5 -> 3 with batch 4: 2 * 4 * 6 * 5 and 2 * 4 * 5 * 3 FLOPs; the first layer needs no input gradient."""
    profile = peak_profile(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), torch.empty(4, 6), ONE)
    ready_s = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    assert (ready_s["1.weight"], ready_s["0.weight"]) == (pytest.approx(120 + 120), pytest.approx(120 + 120 + 240))
    assert profile.forward_s == pytest.approx(360)
    assert profile.backward_s == pytest.approx(480)
    assert profile.update_s == pytest.approx(0, abs=1e-3)


def test_bytes_by_hand() -> None:
    """A ReLU behind a linear layer adds the bytes of the 7 numbers that it reads and of the 7 that it writes."""
    module = nn.Linear(7, 7)
    before, after = (
        peak_profile(one, torch.empty(1, 7), BYTES_ONLY).forward_s for one in (module, nn.Sequential(module, nn.ReLU()))
    )
    assert after - before == pytest.approx(2 * 4 * 7)
    profile = peak_profile(module, torch.empty(1, 7), BYTES_ONLY)
    assert profile.update_s == pytest.approx(UPDATE_BYTES_A_PARAMETER * (7 * 7 + 7))


def test_peak_profile_of_a_zoo_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        module, inputs = build_model("resnet18", 1000), torch.empty(8, 3, 64, 64)
    profile = peak_profile(module, inputs, Device(10, 300))
    check(profile, module)
    assert profile.backward_s > profile.forward_s
    twice = peak_profile(module, torch.empty(16, 3, 64, 64), Device(10, 300))
    assert 1.5 < twice.forward_s / profile.forward_s < 2.01
    # Twice the rates, half the time.
    assert peak_profile(module, inputs, Device(20, 600)).compute_s == pytest.approx(profile.compute_s / 2)


def test_scaled_profile_keeps_its_shape() -> None:
    profile = peak_profile(Net(), torch.empty(4, 6), Device(1, 1))
    twice = profile.scaled(2.0)
    assert twice.compute_s == pytest.approx(2 * profile.compute_s)
    assert twice.samples_per_s == pytest.approx(profile.samples_per_s / 2)
    assert [g.ready_s for g in twice.gradients] == pytest.approx([2 * g.ready_s for g in profile.gradients])


class Odd(nn.Module):
    """Two inputs, a dict as output, a shared weight, a frozen parameter and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"x": self.first(self.second(self.first(x))), "y": y}


@pytest.mark.parametrize("measured", [True, False])
def test_shared_and_frozen_parameters(measured: bool) -> None:
    module, inputs = Odd(), (torch.ones(2, 4), torch.ones(2))
    profile = measure_profile(module, inputs, repetitions=1) if measured else peak_profile(module, inputs, ONE)
    check(profile, module)
    assert {gradient.name for gradient in profile.gradients} == {"first.weight", "first.bias"}


class Unused(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return self[0](input)


class Branching(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.sum() > 0 else input


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Unused(nn.Linear(4, 4), nn.Linear(4, 4)),
            r"Unused cannot be profiled: 1.bias \(1 of 2\) gets no gradient; freeze",
        ),
        (nn.Linear(4, 4).requires_grad_(False), r"output \(Tensor\) holds no tensor to differentiate: return one"),
        (
            Branching(4, 4),
            r"Branching cannot be traced with an input of \(2, 4\) .*measured instead \(layer_times=meas",
        ),
        (nn.Linear(5, 4), r"Linear cannot be traced with an input of \(2, 4\) .*check the input's shape"),
    ],
)
def test_what_cannot_be_profiled_is_named(module: nn.Module, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        peak_profile(module, torch.ones(2, 4), ONE)
