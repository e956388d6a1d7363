"""The loss scale: overflows are skipped, counted and logged, and it survives checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_fourmin import FourMinPrecision
from lightning_fourmin.precision.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, LossScale
from tests.support.half_training import BATCH_SIZE, Net, fit, images, seeded, state, trainer, weights


class Overflow(Net):
    """The loss of some batches is not finite; with a scheduler, which minds a first step that is skipped."""

    bad_batches: tuple[int, ...] = (0, 2)
    value = float("inf")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if batch_idx in self.bad_batches else loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100), "interval": "step"}]


class NeverFinite(Overflow):
    bad_batches = tuple(range(100))
    value = float("nan")


def test_grows_after_the_interval_and_halves_on_overflow() -> None:
    scale = LossScale(8.0, dynamic=True)
    for finite in [True] * GROWTH_INTERVAL + [False] + [True] * (GROWTH_INTERVAL - 1) + [False] * 3:
        scale.update(finite)
    assert (scale.value, scale.skipped_steps, scale.skips_in_a_row) == (1.0, 4, {0: 3})
    scale.update(False)
    assert scale.value == 1.0


def test_static_scale_stays() -> None:
    scale = LossScale(8.0, dynamic=False)
    for finite in (False, *[True] * GROWTH_INTERVAL):
        scale.update(finite)
    assert scale.value == 8.0


class OneOfTwo(Net):
    """Of two optimizers the first never gets finite gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, factor in zip(self.optimizers(), (float("nan"), 1.0), strict=True):
            optimizer.zero_grad()
            self.manual_backward(factor * super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.conv, self.head)]


def test_steps_of_another_optimizer_do_not_count() -> None:
    with (
        pytest.warns(UserWarning, match="8 steps in a row were skipped"),
        pytest.raises(
            RuntimeError, match=r"17 steps in a row, the first at global_step 0 of epoch 0 \('conv.bias' first"
        ),
    ):
        fit(seeded(OneOfTwo), FourMinPrecision(), num_batches=20)


class Finite(Overflow):
    """The batches that Overflow makes good steps with."""

    bad_batches = ()


def test_overflowed_steps_change_nothing(tmp_path: Path) -> None:
    net, precision = seeded(Overflow), FourMinPrecision()
    run = fit(net, precision, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    good = seeded(Finite)
    dataset = Subset(images(4).dataset, [*range(BATCH_SIZE, 2 * BATCH_SIZE), *range(3 * BATCH_SIZE, 4 * BATCH_SIZE)])
    trainer(FourMinPrecision(loss_scale=2.0**15)).fit(good, DataLoader(dataset, BATCH_SIZE))
    assert torch.equal(weights(net), weights(good))
    assert run.global_step == 4
    assert run.callback_metrics["fourmin/skipped_steps"] == precision.loss_scale.skipped_steps == 2
    assert run.callback_metrics["fourmin/loss_scale"] == precision.loss_scale.value == 2.0**14
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert len(lines) == 5
    column = lines[0].split(",").index("fourmin/loss_scale")
    assert [float(line.split(",")[column]) for line in lines[1:]] == [2.0**15, 2.0**15, 2.0**14, 2.0**14]


@pytest.mark.parametrize(
    ("arguments", "scale"), [({}, "1"), ({"loss_scale": 128}, "128"), ({"dtype": "bf16"}, "1")], ids=str
)
def test_never_finite_is_an_error(arguments: dict[str, Any], scale: str) -> None:
    net = seeded(NeverFinite)
    before = weights(net)
    text = (
        r"17 steps in a row, the first at global_step 0 of epoch 0 \('head.bias' first; all gradients, so it began "
        rf".*\), the last with loss scale {scale}; the loss is nan on rank 0: look"
    )
    with (
        pytest.warns(UserWarning, match="8 steps in a row were skipped: their gradients are not finite"),
        pytest.raises(RuntimeError, match=text),
    ):
        fit(net, FourMinPrecision(**arguments), num_batches=20)
    assert torch.equal(weights(net), before)


def test_barebones_trainer() -> None:
    run = trainer(FourMinPrecision(), barebones=True, logger=None, enable_checkpointing=None)
    run.fit(seeded(), images(2))
    assert run.global_step == 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_resume_continues_in_every_bit(dtype: str, tmp_path: Path) -> None:
    at_once, first = seeded(Overflow), seeded(Overflow)
    reference = FourMinPrecision(dtype)
    fit(at_once, reference, max_epochs=2)
    path = tmp_path / "first.ckpt"
    fit(first, FourMinPrecision(dtype)).save_checkpoint(path)
    resumed, precision = Overflow(), FourMinPrecision(dtype)
    trainer(precision, max_epochs=2).fit(resumed, images(4), ckpt_path=path)
    assert torch.equal(state(resumed), state(at_once))
    assert precision.state_dict() == reference.state_dict()
    assert precision.loss_scale.skipped_steps == 4


def test_checkpoints_cross_over_to_fp32_and_back(tmp_path: Path) -> None:
    half, full = tmp_path / "half.ckpt", tmp_path / "full.ckpt"
    net = seeded()
    fit(net, FourMinPrecision()).save_checkpoint(half)
    saved = torch.load(half)["state_dict"]
    assert {t.dtype for t in saved.values() if t.is_floating_point()} == {torch.float32}
    plain = Net()
    run = trainer(max_epochs=2)
    run.fit(plain, images(4), ckpt_path=half)
    run.save_checkpoint(full)
    assert run.global_step == 8
    back, precision = Net(), FourMinPrecision()
    trainer(precision, max_epochs=3).fit(back, images(4), ckpt_path=full)
    assert precision.loss_scale.value == 2.0**16
    assert not torch.equal(state(back), state(plain))


def test_a_run_that_went_on_from_a_static_scale_lets_its_own_grow() -> None:
    static, dynamic = LossScale(8.0, dynamic=False), LossScale(INITIAL_SCALE, dynamic=True)
    for _ in range(GROWTH_INTERVAL + 1):
        static.update(finite=True)
    dynamic.load_state_dict(static.state_dict())
    for _ in range(GROWTH_INTERVAL):
        dynamic.update(finite=True)
    assert dynamic.value == 2 * INITIAL_SCALE


def test_scale_of_another_kind_is_not_loaded() -> None:
    dynamic, static, bf16 = FourMinPrecision(), FourMinPrecision(loss_scale=8), FourMinPrecision("bf16")
    for found, saved, expected in ((dynamic, bf16, 2.0**16), (static, dynamic, 8.0), (bf16, dynamic, 1.0)):
        found.load_state_dict(saved.state_dict())
        assert found.loss_scale.value == expected
