"""The rate of each step against the published recipes, and the arithmetic of a run in words."""

import math
from typing import Any

import pytest

from lightning_fourmin.optim.schedule import CosineSchedule, GlobalBatch, PolySchedule, RatePlan, Schedule, StepSchedule

NUM_IMAGES = 1_281_167
# Batch, base rate, warm-up epochs, epochs: ResNet-50's LARS recipes in MLPerf's reference.
MLPERF = [(4096, 10.0, 5, 40), (8192, 17.0, 5, 42), (32768, 21.2, 16, 56), (65536, 24.699, 31, 85)]


def mlperf_rate(step: int, peak: float, warmup_steps: int, total_steps: int) -> float:
    """The reference's rule: a linear ramp, then TensorFlow's polynomial_decay with power 2 and end rate 1e-4."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    decay_steps = total_steps - warmup_steps + 1
    passed = min(max(1, step - warmup_steps), decay_steps)
    return float((peak - 1e-4) * (1 - passed / decay_steps) ** 2.0 + 1e-4)


@pytest.mark.parametrize(("batch", "rate", "warmup_epochs", "num_epochs"), MLPERF)
def test_rates_of_the_mlperf_recipes(batch: int, rate: float, warmup_epochs: int, num_epochs: int) -> None:
    steps_per_epoch = NUM_IMAGES // batch
    total, warmup = num_epochs * steps_per_epoch, warmup_epochs * steps_per_epoch
    schedule = PolySchedule(warmup_epochs=warmup_epochs)
    plan = schedule.plan(rate, GlobalBatch(32, batch // 32), steps_per_epoch, total)
    for step in range(total + 1):
        assert plan.lr(step) == pytest.approx(mlperf_rate(step, rate, warmup, total), rel=1e-12)
    assert plan.lr(0) == 0
    assert max(plan.lr(step) for step in range(total)) == plan.lr(warmup) == rate
    assert plan.lr(total + 1) == pytest.approx(1e-4)


def test_rates_of_the_alexnet_recipe() -> None:
    """LARS's author, batch 8K: from rate 1 to 10 in 600 steps, then poly 2."""
    plan = PolySchedule(warmup_steps=600, warmup_start_lr=1.0, end_lr=0.0).plan(10.0, None, 156, 15_600)
    assert [plan.lr(step) for step in (0, 300, 600)] == [1.0, 5.5, 10.0]
    assert plan.lr(600 + 7500) == pytest.approx(10 * (1 - 7500 / 15_001) ** 2)


def test_linear_scaling_counts_accumulation() -> None:
    schedule = StepSchedule(base_batch=256, warmup_epochs=5)
    for batch in (GlobalBatch(32, 256), GlobalBatch(32, 8, num_accumulated=32)):
        assert batch.size == 8192
        plan = schedule.plan(0.1, batch, 156, 90 * 156)
        assert plan.peak_lr == pytest.approx(3.2)
    # Goyal et al.: a tenth of the rate at each of these epochs.
    for epoch, share in ((29.9, 1), (30, 0.1), (59.9, 0.1), (60, 0.01), (80, 0.001), (89, 0.001)):
        assert plan.lr(math.ceil(epoch * 156)) == pytest.approx(3.2 * share)


def test_falling_at_epochs_needs_their_length() -> None:
    with pytest.raises(
        ValueError, match=r"epochs=\(30, 60, 80\), but the train loader does not know how long an epoch"
    ):
        StepSchedule().plan(0.1, None, math.inf, 100)
    assert StepSchedule(epochs=()).plan(0.1, None, math.inf, 100).lr(99) == 0.1


def test_cosine() -> None:
    plan = CosineSchedule(end_lr=0.2, warmup_epochs=1).plan(2.0, None, 10, 29)
    assert plan.lr(10) == 2
    assert plan.lr(20) == pytest.approx(1.1)
    assert plan.lr(30) == pytest.approx(0.2)
    # A run that goes on after its plan stays at the end.
    assert plan.lr(99) == pytest.approx(0.2)


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    assert PolySchedule().plan(2.0, None, 10, 100).lr(0) == 2.0


@pytest.mark.parametrize(
    ("plan", "sentences"),
    [
        (
            PolySchedule(warmup_epochs=31).plan(24.699, GlobalBatch(64, 128, 8), 19, 1615),
            [
                "Global batch: 64 a rank x 128 ranks x 8 accumulated = 65,536.",
                "Peak rate: 24.699, as given.",
                "Length: 85 epochs x 19 steps = 1,615 steps.",
                "Rate: 0 to 24.699 in 589 steps, then down to 0.0001 with power 2.",
            ],
        ),
        (
            StepSchedule(base_batch=256).plan(0.1, GlobalBatch(32, 1), 100, 9000),
            [
                "Global batch: 32 a rank x 1 rank = 32.",
                "Peak rate: 0.1 x 32 / 256 = 0.0125 (linear scaling rule).",
                "Length: 90 epochs x 100 steps = 9,000 steps.",
                "Rate: 0.0125, then x 0.1 at epochs 30, 60, 80.",
            ],
        ),
        (
            CosineSchedule(warmup_steps=10, warmup_start_lr=0.5).plan(1.0, None, math.inf, 8),
            [
                "Peak rate: 1, as given.",
                "Length: 8 steps.",
                "Rate: 0.5 to 1 in 10 steps, but the run ends before that.",
            ],
        ),
        (
            StepSchedule(epochs=()).plan(1.0, None, 3, 9),
            ["Peak rate: 1, as given.", "Length: 3 epochs x 3 steps = 9 steps.", "Rate: 1, then constant."],
        ),
    ],
)
def test_arithmetic_in_words(plan: RatePlan, sentences: list[str]) -> None:
    assert plan.in_words() == sentences


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_batch": 0}, "base_batch=0 must be at least 1, or None to take the rate as it is"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1 must be at least 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"warmup_start_lr": -1}, "warmup_start_lr=-1 must be at least 0"),
        ({"warmup_epochs": 1, "warmup_steps": 5}, "warmup_epochs=1 and warmup_steps=5 both set the length"),
    ],
)
@pytest.mark.parametrize("kind", [PolySchedule, CosineSchedule, StepSchedule])
def test_fields_that_make_no_sense(kind: type[Schedule], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_what_a_plan_needs_to_know() -> None:
    with pytest.raises(ValueError, match="base_batch=256 scales the rate with the global batch, but neither the data"):
        PolySchedule(base_batch=256).plan(0.1, None, 10, 100)
    with pytest.raises(ValueError, match=r"warmup_epochs=5, but the train loader .* give warmup_steps instead"):
        PolySchedule(warmup_epochs=5).plan(0.1, None, math.inf, 100)
    with pytest.raises(ValueError, match="the optimizer's lr=0 must be above 0"):
        PolySchedule().plan(0.0, None, 10, 100)


def test_a_high_rate_without_warm_up_is_warned_of() -> None:
    plan = PolySchedule().plan(10.0, None, 23, 23)
    assert plan.warning() == (
        "A rate of 10 from the first step on often makes a training diverge: give the schedule warmup_epochs, or a "
        "lower rate."
    )
    assert PolySchedule(warmup_steps=5).plan(10.0, None, 23, 23).warning() is None
    assert PolySchedule().plan(0.1, None, 23, 23).warning() is None
