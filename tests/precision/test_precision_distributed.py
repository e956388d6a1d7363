"""FourMinPrecision on several ranks: the 16-bit wire, steps skipped together, DDP's features."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_fourmin import FourMinPrecision, FourMinStrategy
from lightning_fourmin.allreduce.engine import Engine
from tests.strategy.test_ddp_features import TwoHeads, TwoOptimizers
from tests.support.parity import Net, digest, images, relative_error, weights
from tests.support.pool import RankPool
from tests.support.ranks import rank_env
from tests.support.training import rank_trainer

NODES = (2, 1)


class OneBadRank(Net):
    """The loss of one rank is not finite: now and then, or always."""

    bad_batches: tuple[int, ...] = (0, 3)
    value = float("inf")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.global_rank == 1 and batch_idx in self.bad_batches else loss


class BadRankFromThen(OneBadRank):
    bad_batches = tuple(range(2, 100))
    value = float("nan")


def train(
    strategy: DDPStrategy, net_type: type[LightningModule] = Net, num_batches: int = 6, **trainer_kwargs: Any
) -> tuple[LightningModule, FourMinPrecision]:
    torch.manual_seed(1)
    net, precision = net_type(), FourMinPrecision()
    trainer = rank_trainer(strategy, max_epochs=1, plugins=[rank_env(), precision], **trainer_kwargs)
    trainer.fit(net, images(num_batches))
    return net, precision


def skip_together(algorithm: str) -> tuple[str, int, float]:
    net, precision = train(FourMinStrategy(algorithm=algorithm, fusion_mb=0.05), OneBadRank)
    return digest(weights(net)), precision.loss_scale.skipped_steps, precision.loss_scale.value


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_all_ranks_skip_together(ranks: RankPool, algorithm: str) -> None:
    answers = ranks.run(skip_together, algorithm, nodes=NODES)
    assert len(set(answers)) == 1
    _, skipped_steps, scale = answers[0]
    assert (skipped_steps, scale) == (2, 2.0**14)


class OwnBias(OneBadRank):
    """Each rank has a parameter of its own, which alone sees the loss that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList([torch.zeros(())])
        # By its layer: DDP does not know a parameter of the module itself by its name.
        self._ddp_params_and_buffers_to_ignore = ["own.0"]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        is_bad = self.global_rank == 1 and batch_idx in self.bad_batches
        return Net.training_step(self, batch, batch_idx) + self.own[0] * (self.value if is_bad else 0.5)


class OwnBiasOutside(OneBadRank):
    """The same, of a parameter that only the optimizer has."""

    training_step = OwnBias.training_step

    def __init__(self) -> None:
        super().__init__()
        self.own = [nn.Parameter(torch.zeros(()))]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *self.own], lr=0.005, momentum=0.9)


def skip_for_an_own_gradient() -> tuple[str, int, float]:
    net, precision = train(FourMinStrategy(), OwnBias)
    return digest(weights(net)), precision.loss_scale.skipped_steps, precision.loss_scale.value


def test_all_ranks_skip_for_a_gradient_that_one_of_them_keeps(ranks: RankPool) -> None:
    answers = ranks.run(skip_for_an_own_gradient, nodes=NODES)
    assert len(set(answers)) == 1
    assert answers[0][1:] == (2, 2.0**14)


def accumulate_with_overflow() -> tuple[str, int]:
    """The bad batch is not the one that is all-reduced."""
    net, precision = train(FourMinStrategy(fusion_mb=0.05), OneBadRank, accumulate_grad_batches=2)
    return digest(weights(net)), precision.loss_scale.skipped_steps


def test_overflow_of_an_accumulated_batch_reaches_all_ranks(ranks: RankPool) -> None:
    answers = ranks.run(accumulate_with_overflow, nodes=NODES)
    assert len(set(answers)) == 1
    assert answers[0][1] == 2


class OwnBiasFromThen(OwnBias):
    bad_batches = BadRankFromThen.bad_batches
    value = float("nan")


class OwnBiasOutsideFromThen(OwnBiasOutside):
    bad_batches = BadRankFromThen.bad_batches
    value = float("nan")


def never_finite(net_type: type[LightningModule]) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="8 steps in a row were skipped")
        try:
            train(FourMinStrategy(fusion_mb=0.05), net_type, num_batches=20)
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_all_ranks_give_up_together(ranks: RankPool) -> None:
    texts = ranks.run(never_finite, BadRankFromThen, world=2)
    assert texts[0] == texts[1]
    assert "not finite in 17 steps in a row, the first at global_step 2 of epoch 0 (" in texts[0]
    assert "the last with loss scale 1; the loss is nan on rank 1: look" in texts[0]


@pytest.mark.parametrize(
    ("net_type", "where"),
    [
        (OwnBiasFromThen, "'own.0' first; 1 of 9 gradients"),
        (OwnBiasOutsideFromThen, "a parameter outside of the module first; 1 of 9 gradients"),
    ],
)
def test_each_rank_says_whether_the_gradient_is_its_own(
    ranks: RankPool, net_type: type[LightningModule], where: str
) -> None:
    texts = ranks.run(never_finite, net_type, nodes=NODES)
    elsewhere = "on another rank; the gradients of this one are finite"
    for text, place in zip(texts, (elsewhere, where, elsewhere), strict=True):
        assert text.startswith(
            f"gradients were not finite in 17 steps in a row, the first at global_step 2 of epoch 0 ({place}), the "
            "last with loss scale 1; the loss is nan on rank 1: look for bad data"
        )


def wire_bytes(wire_dtype: str | None) -> int:
    """Bytes of the tensors that the engine hands to the collectives in one step, seen on their way."""
    seen: list[int] = []
    prepare = Engine._prepare

    def see(engine: Engine, piece: Any) -> None:
        prepare(engine, piece)
        seen.append(piece.wire.nbytes)

    Engine._prepare = see  # type: ignore[method-assign]
    try:
        train(FourMinStrategy(wire_dtype=wire_dtype), num_batches=1)
    finally:
        Engine._prepare = prepare  # type: ignore[method-assign]
    return sum(seen)


def test_gradients_cross_the_wire_in_the_compute_dtype(ranks: RankPool) -> None:
    num_parameters = sum(p.numel() for p in Net().parameters())
    assert ranks.run(wire_bytes, None, world=2) == [2 * num_parameters] * 2
    assert ranks.run(wire_bytes, "fp32", world=2) == [4 * num_parameters] * 2


def train_both(net_type: type[LightningModule], strategy: dict[str, Any], **kwargs: Any) -> list[Tensor]:
    """Weights after training on DDP's FP32 wire and on ours in FP16."""
    plain, _ = train(DDPStrategy(**strategy), net_type, **kwargs)
    ours, _ = train(FourMinStrategy(algorithm="hierarchical", fusion_mb=0.05, **strategy), net_type, **kwargs)
    torch.manual_seed(1)
    start = weights(net_type())
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    return [weights(plain) - start, weights(ours) - start]


@pytest.mark.parametrize(
    ("net_type", "strategy", "arguments"),
    [
        pytest.param(Net, {}, {}, id="plain"),
        pytest.param(Net, {}, {"num_batches": 7, "accumulate_grad_batches": 2}, id="accumulation"),
        pytest.param(TwoHeads, {"find_unused_parameters": True}, {}, id="unused parameters"),
        pytest.param(Net, {"static_graph": True}, {}, id="static graph"),
        pytest.param(
            Net,
            {"gradient_as_bucket_view": True},
            {"num_batches": 7, "accumulate_grad_batches": 2},
            id="accumulation into views",
        ),
        pytest.param(TwoOptimizers, {"find_unused_parameters": True}, {}, id="two optimizers"),
        pytest.param(Net, {}, {"gradient_clip_val": 0.1}, id="clipping"),
    ],
)
def test_same_updates_as_with_ddp(
    ranks: RankPool, net_type: type[LightningModule], strategy: dict[str, Any], arguments: dict[str, Any]
) -> None:
    answers = ranks.run(train_both, net_type, strategy, nodes=NODES, **arguments)
    for expected, found in answers:
        # What the FP16 wire may round away.
        assert relative_error(found, expected) < 1e-2
        assert torch.equal(found, answers[0][1])


class Evaluated(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        assert loss.dtype is torch.float32
        self.log("loss", loss, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def evaluate() -> tuple[list[str], float]:
    trainer, net = rank_trainer(FourMinStrategy(), precision="bf16-true"), Evaluated()
    (metrics,) = trainer.validate(net, images(2), verbose=False)
    predictions = trainer.predict(net, images(2))
    assert predictions is not None
    return [str(p.dtype) for p in predictions], metrics["loss"]


def test_evaluation_in_16_bit(ranks: RankPool) -> None:
    answers = ranks.run(evaluate, nodes=NODES)
    assert all(dtypes == ["torch.bfloat16"] * 2 for dtypes, _ in answers)
    assert len({loss for _, loss in answers}) == 1
