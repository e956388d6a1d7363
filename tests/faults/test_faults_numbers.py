"""Numbers that are not finite: all ranks stop together, before the weights change, and say where it began."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_fourmin import FiniteCheck, FourMinPrecision, FourMinStrategy
from lightning_fourmin.precision.overflow import all_finite
from tests.precision.test_precision_distributed import OwnBiasFromThen, OwnBiasOutsideFromThen
from tests.support.parity import Net, digest, images, weights
from tests.support.pool import RankPool
from tests.support.ranks import rank_env
from tests.support.training import rank_trainer

BAD_STEP = 2


def test_sparse_gradients_are_looked_at_as_well() -> None:
    place, values = torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(place, values, (3,), check_invariants=True)
    assert all_finite([torch.ones(2), sparse])
    assert not all_finite([torch.ones(2), sparse * float("inf")])


def test_complex_gradients_are_looked_at_as_well() -> None:
    assert all_finite([torch.ones(2, dtype=torch.complex64), torch.ones(2)])
    assert not all_finite([torch.tensor([1.0, complex(0.0, float("nan"))])])


class BadInput(Net):
    """One pixel of one rank's batch is not finite."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx >= BAD_STEP:
            batch[0][0, 0, 0, 0] = float("nan")
        return super().training_step(batch, batch_idx)


class BadGradient(Net):
    """The gradient of one layer overflows on one rank."""

    def on_fit_start(self) -> None:
        self.hidden[0].weight.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor | None:
        return gradient * float("inf") if self.global_rank == 1 and self.trainer.global_step >= BAD_STEP else None


class Diverging(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e12)


def train(kind: type[Net], plugins: list[Any], num_batches: int = 20) -> tuple[str, str, bool, int]:
    """The error; digest of the weights, whether they are finite, and the number of steps that were done."""
    torch.manual_seed(1)
    net, text = kind(), "no error"
    run = rank_trainer(FourMinStrategy(), max_epochs=1, callbacks=[FiniteCheck()], plugins=[rank_env(), *plugins])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="8 steps in a row were skipped")
        try:
            run.fit(net, images(num_batches))
        except RuntimeError as error:
            text = str(error)
    return text, digest(weights(net)), bool(weights(net).isfinite().all()), run.global_step


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (
            BadInput,
            r"global_step 2 of epoch 0 \('head.bias' first; all gradients, so it began before the backward pass: in "
            r"the batch, a layer or the loss\); the loss is nan on rank 1; the batch is not finite on rank 1: look for",
        ),
        (
            BadGradient,
            r"global_step 2 of epoch 0 \('hidden.0.weight' first; 1 of 8 gradients\); the loss is finite on all ranks; "
            r"the batch is finite on all ranks: look for",
        ),
        (
            Diverging,
            r"global_step \d of epoch 0 \(.*; the loss is (nan|inf) on rank 0, (nan|inf) on rank 1; the batch is",
        ),
    ],
)
def test_all_ranks_stop_before_the_weights_change(ranks: RankPool, kind: type[Net], where: str) -> None:
    answers = ranks.run(train, kind, [], world=2)
    assert answers[0] == answers[1]
    text, _, finite, num_steps = answers[0]
    assert finite
    with pytest.raises(RuntimeError, match=rf"^gradients are not finite at {where}"):
        raise RuntimeError(text)
    if kind is not Diverging:
        assert num_steps == BAD_STEP


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (OwnBiasFromThen, "'own.0' first; 1 of 9 gradients"),
        (OwnBiasOutsideFromThen, "a parameter outside of the module first; 1 of 9 gradients"),
    ],
)
def test_all_ranks_stop_for_a_gradient_that_one_of_them_keeps(ranks: RankPool, kind: type[Net], where: str) -> None:
    answers = ranks.run(train, kind, [], world=2)
    assert answers[0][1:] == answers[1][1:]
    _, _, finite, num_steps = answers[0]
    assert finite
    assert num_steps == BAD_STEP
    elsewhere = "on another rank; the gradients of this one are finite"
    for (text, *_), place in zip(answers, (elsewhere, where), strict=True):
        assert text.startswith(
            f"gradients are not finite at global_step 2 of epoch 0 ({place}); the loss is nan on rank 1; the batch is "
            "finite on all ranks: look for bad data"
        )


def test_overflow_storm_names_the_layer_where_it_began(ranks: RankPool) -> None:
    answers = ranks.run(train, BadGradient, [FourMinPrecision()], world=2)
    assert answers[0] == answers[1]
    text, _, finite, num_steps = answers[0]
    assert text.startswith(
        "gradients were not finite in 17 steps in a row, the first at global_step 2 of epoch 0 ('hidden.0.weight' "
        "first; 1 of 8 gradients), the last with loss scale 1; the loss is finite on all ranks: look for bad data"
    )
    assert finite
    assert num_steps == BAD_STEP + 16


class BadOnce(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 and batch_idx == BAD_STEP else loss


def mixed() -> tuple[str, bool]:
    net = BadOnce()
    plugins = [rank_env(), MixedPrecision("16-mixed", "cpu")]
    rank_trainer(FourMinStrategy(), max_epochs=1, callbacks=[FiniteCheck()], plugins=plugins).fit(net, images(4))
    return digest(weights(net)), bool(weights(net).isfinite().all())


def test_steps_that_a_loss_scale_skips_are_left_to_it(ranks: RankPool) -> None:
    first, second = ranks.run(mixed, world=2)
    assert first == second
    assert first[1]
