"""Tensor fusion: the rule, the caps that make DDP follow it, and the buckets that DDP really hands over."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

import lightning_fourmin.strategy
from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.buckets import MIB, FusionPlan
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer

KIB = 1024
THRESHOLD_MB = 8 / 1024


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    """Parameters of `sizes` KiB in registration order, named by their place."""
    return [
        (f"p{i}", nn.Parameter(torch.zeros(size * KIB // dtype.itemsize, dtype=dtype))) for i, size in enumerate(sizes)
    ]


def names(plan: FusionPlan) -> list[tuple[str, ...]]:
    return [bucket.names for bucket in plan.buckets]


def caps_kib(plan: FusionPlan) -> list[float]:
    return [cap * 1024 for cap in plan.caps_mb]


# The rule, with a threshold of 8 KiB. Gradients are ready in the reverse of the order of registration.


def test_pool_closes_when_it_passes_the_threshold() -> None:
    plan = FusionPlan.build(parameters(3, 3, 3, 3, 3, 3), THRESHOLD_MB)
    assert names(plan) == [("p5", "p4", "p3"), ("p2", "p1", "p0")]
    assert [bucket.num_bytes for bucket in plan.buckets] == [9 * KIB, 9 * KIB]


def test_pool_of_just_the_threshold_stays_open() -> None:
    assert names(FusionPlan.build(parameters(1, 4, 4), THRESHOLD_MB)) == [("p2", "p1", "p0")]


def test_gradient_of_just_the_threshold_is_pooled() -> None:
    assert names(FusionPlan.build(parameters(8, 1), THRESHOLD_MB)) == [("p1", "p0")]


def test_gradient_above_the_threshold_goes_alone() -> None:
    plan = FusionPlan.build(parameters(2, 2, 9, 2, 2), THRESHOLD_MB)
    assert names(plan) == [("p4", "p3"), ("p2",), ("p1", "p0")]
    assert caps_kib(plan) == [4, 9, 4]


def test_gradient_above_the_threshold_takes_along_what_is_small() -> None:
    plan = FusionPlan.build([*parameters(2, 2, 9), ("bias", nn.Parameter(torch.zeros(128)))], THRESHOLD_MB)
    assert names(plan) == [("bias", "p2"), ("p1", "p0")]
    assert caps_kib(plan) == [9.5, 4]


def test_large_gradients_in_a_row() -> None:
    assert names(FusionPlan.build(parameters(20, 9, 30), THRESHOLD_MB)) == [("p2",), ("p1",), ("p0",)]


def test_small_threshold_gives_every_gradient_its_bucket() -> None:
    assert names(FusionPlan.build(parameters(1, 2, 3), 1e-9)) == [("p2",), ("p1",), ("p0",)]


def test_large_threshold_gives_one_bucket() -> None:
    plan = FusionPlan.build(parameters(1, 2, 3), 1024)
    assert names(plan) == [("p2", "p1", "p0")]
    assert plan.caps_mb == (6 * KIB / MIB,)


def test_caps_survive_ddp_s_conversion_to_bytes() -> None:
    """DDP takes int(cap_mb * MiB); a byte less would cut before the last gradient of a bucket."""
    odd = [(f"p{i}", nn.Parameter(torch.zeros(n))) for i, n in enumerate([333, 1001, 77, 4099, 13, 2_500_001, 7])]
    plan = FusionPlan.build(odd, THRESHOLD_MB)
    assert [int(cap * MIB) for cap in plan.caps_mb] == [bucket.num_bytes for bucket in plan.buckets]
    assert len(plan.buckets) == 3


# Empty gradients.


def test_empty_gradients_ride_along() -> None:
    plan = FusionPlan.build(parameters(0, 3, 0, 9, 0), THRESHOLD_MB)
    assert sorted(name for bucket in names(plan) for name in bucket) == ["p0", "p1", "p2", "p3", "p4"]
    assert [bucket.num_bytes for bucket in plan.buckets if bucket.num_bytes] == [9 * KIB, 3 * KIB]


def test_empty_gradient_before_a_large_one_does_not_shift_the_later_cuts() -> None:
    plan = FusionPlan.build(parameters(3, 3, 3, 3, 30, 0), THRESHOLD_MB)
    assert [bucket.num_bytes for bucket in plan.buckets if bucket.num_bytes] == [30 * KIB, 9 * KIB, 3 * KIB]


def test_only_empty_gradients() -> None:
    plan = FusionPlan.build(parameters(0, 0), THRESHOLD_MB)
    assert names(plan) == [("p1", "p0")]
    assert all(cap > 0 for cap in plan.caps_mb)


# Several dtypes: one list of caps, made for the dtype with the most bytes.


def test_each_dtype_has_buckets_of_its_own() -> None:
    mixed = parameters(3, 3, 3, 3, 3, 3)
    mixed[1:1] = [("half", nn.Parameter(torch.zeros(512, dtype=torch.float16)))]
    plan = FusionPlan.build(mixed, THRESHOLD_MB)
    assert caps_kib(plan) == [9, 9]
    by_dtype = {torch.float32: [("p5", "p4", "p3"), ("p2", "p1", "p0")], torch.float16: [("half",)]}
    for dtype, expected in by_dtype.items():
        assert [bucket.names for bucket in plan.buckets if bucket.dtype is dtype] == expected
    assert sum(bucket.num_bytes for bucket in plan.buckets) == 19 * KIB


def test_caps_are_made_for_the_dtype_with_the_most_bytes() -> None:
    singles, doubles = parameters(2, 2), parameters(5, 5, 5, 5, dtype=torch.float64)
    plan = FusionPlan.build([*singles, *doubles], THRESHOLD_MB)
    assert caps_kib(plan) == [10, 10]


# find_unused_parameters: DDP cuts in registration order, once, and hands over from the last bucket to the first.


def test_not_rebuilt_cuts_at_the_same_places() -> None:
    sizes = (2, 3, 3, 9, 2, 2, 1)
    kept, rebuilt = (FusionPlan.build(parameters(*sizes), THRESHOLD_MB, rebuilt) for rebuilt in (False, True))
    assert [set(bucket) for bucket in names(kept)] == [set(bucket) for bucket in names(rebuilt)]
    assert kept.caps_mb == rebuilt.caps_mb[::-1]
    assert names(kept) == [("p4", "p5", "p6"), ("p3",), ("p0", "p1", "p2")]


# The buckets that DDP really hands over, on two ranks.


class Block(nn.Module):
    """A residual block; with a stride its skip connection has a convolution too, as in ResNet."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.down = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.plain = stride == 1 and width_in == width
        if self.plain:
            self.down = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + self.down(x)).relu()


class Casts(nn.Module):
    """A layer in double precision between layers in single precision, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.empty = nn.Parameter(torch.empty(0))
        self.middle = nn.Linear(48, 48).double()
        self.last = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.middle(self.first(x).double())
        return self.last(doubled.float() + self.empty.sum())


def chain() -> nn.Module:
    layers = [nn.Linear(width_in, width) for width_in, width in ((16, 32), (32, 96), (96, 24), (24, 24), (24, 8))]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.ReLU())])


def partly_trained_chain() -> nn.Module:
    """One parameter is frozen, one is left out of DDP: neither may be in a bucket."""
    net = chain()
    net.get_parameter("2.weight").requires_grad = False
    net.get_parameter("4.weight").ignored = True  # type: ignore[attr-defined]
    return net


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1), Block(16, 32, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


Handed = tuple[frozenset[str], int, torch.dtype]


def handed_over(
    make: Callable[[], nn.Module], shape: Sequence[int], threshold_mb: float, **kwargs: Any
) -> tuple[list[Handed], list[list[Handed]]]:
    """Buckets of the plan, and those of each of four steps in the order in which the hook got them."""
    model = Regression(make())
    model._ddp_params_and_buffers_to_ignore = [n for n, p in model.named_parameters() if hasattr(p, "ignored")]
    strategy = FourMinStrategy(fusion_mb=threshold_mb, **kwargs)
    trainer = rank_trainer(strategy, max_steps=4)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    steps: list[list[Handed]] = [[] for _ in range(4)]
    real_hook = lightning_fourmin.strategy.all_reduce_hook

    def recording_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        members = frozenset(name_of[id(parameter)] for parameter in bucket.parameters())
        steps[trainer.global_step].append((members, bucket.buffer().nbytes, bucket.buffer().dtype))
        return real_hook(state, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_fourmin.strategy, "all_reduce_hook", recording_hook)
        trainer.fit(model, data(*shape))
    assert strategy.fusion_plan is not None
    # Not the order inside a bucket: batch norm hands over its weight before its bias.
    return [(frozenset(b.names), b.num_bytes, b.dtype) for b in strategy.fusion_plan.buckets], steps


@pytest.mark.parametrize(
    ("make", "shape", "threshold_mb", "at_least"),
    [
        (chain, (16,), THRESHOLD_MB, 4),
        (partly_trained_chain, (16,), THRESHOLD_MB / 4, 3),
        (resnet, (3, 8, 8), THRESHOLD_MB, 8),
        (Casts, (16,), THRESHOLD_MB, 2),
        (Casts, (16,), 1.0, 2),
    ],
)
@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp_hands_over_the_buckets_of_the_plan(
    ranks: RankPool,
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    threshold_mb: float,
    at_least: int,
    kwargs: dict[str, bool],
) -> None:
    for planned, steps in ranks.run(handed_over, make, shape, threshold_mb, **kwargs):
        assert len(planned) >= at_least
        # DDP knows the order in which gradients become ready after the first step, with a static graph after two.
        settled = 2 if "static_graph" in kwargs else 1
        assert steps[settled:] == [planned] * (4 - settled)


def plan_beside(**kwargs: Any) -> FusionPlan | None:
    strategy = FourMinStrategy(**kwargs)
    trainer = rank_trainer(strategy, max_steps=2)
    trainer.fit(Regression(chain()), data(16))
    return strategy.fusion_plan


def test_no_plan_where_ddp_cuts_or_another_hook_runs(ranks: RankPool) -> None:
    assert ranks.run(plan_beside) != [None, None]
    assert ranks.run(plan_beside, bucket_cap_mb=0.01) == [None, None]
    assert ranks.run(plan_beside, ddp_comm_hook=allreduce_hook) == [None, None]
