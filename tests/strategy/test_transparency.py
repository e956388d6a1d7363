"""Training with `fourmin` gives the weights that plain DDP gives, whatever the algorithm, nodes, groups and fusion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_fourmin import FourMinStrategy
from tests.support.parity import Net, digest, images, relative_error, state, weights
from tests.support.pool import RankPool
from tests.support.training import rank_trainer

NUM_STEPS = 20
FUSIONS_MB = (0.01, 0.3, 50.0)


@dataclass(frozen=True)
class Trained:
    """What a rank has after training."""

    state_digest: str
    num_buckets: int
    weights: Tensor | None
    """On rank 0; the digest speaks for the others."""


class SeeBuckets(Callback):
    """Keeps how many buckets DDP made of the gradients."""

    num_buckets = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self.num_buckets = len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


def initial_net() -> Net:
    torch.manual_seed(1)
    return Net()


def train(strategies: Sequence[dict[str, Any] | None]) -> list[Trained]:
    """Trains the same net with each strategy; without an algorithm it is plain DDP."""
    answers = []
    for arguments in strategies:
        net, buckets = initial_net(), SeeBuckets()
        ours = arguments is not None and "algorithm" in arguments
        strategy = (FourMinStrategy if ours else DDPStrategy)(**(arguments or {}))
        trainer = rank_trainer(strategy, max_epochs=1, callbacks=[buckets])
        trainer.fit(net, images(NUM_STEPS))
        assert trainer.global_step == NUM_STEPS
        answers.append(
            Trained(digest(state(net)), buckets.num_buckets, weights(net) if trainer.is_global_zero else None)
        )
    return answers


@pytest.fixture(scope="module")
def plain_ddp(ranks: RankPool) -> Callable[[int], Trained]:
    """What plain DDP reaches on rank 0 of a world, trained once."""
    known: dict[int, Trained] = {}

    def reference(world: int) -> Trained:
        if world not in known:
            known[world] = ranks.run(train, [None], world=world, timeout=120)[0][0]
        return known[world]

    return reference


def train_alike(ranks: RankPool, strategies: list[dict[str, Any]], nodes: Sequence[int]) -> list[Trained]:
    """What each strategy reaches, the same in every bit on all ranks."""
    by_rank = ranks.run(train, strategies, nodes=nodes, timeout=240)
    for i, arguments in enumerate(strategies):
        assert len({answers[i].state_digest for answers in by_rank}) == 1, f"ranks differ with {arguments} on {nodes}"
    return by_rank[0]


def error_of_update(found: Trained, expected: Trained) -> float:
    """Distance of the weights from the expected ones, relative to how far training moved them."""
    assert found.weights is not None
    assert expected.weights is not None
    start = weights(initial_net())
    return relative_error(found.weights - start, expected.weights - start)


def strategies_for(nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Every algorithm with every group size that it can use, the fusion threshold going round."""
    world = sum(nodes)
    choices: list[dict[str, Any]] = [{"algorithm": "ring"}, {"algorithm": "hybrid"}]
    choices += [{"algorithm": "hierarchical", "group_size": size} for size in range(1, world + 1)]
    choices += [{"algorithm": "torus", "group_size": size} for size in range(1, world + 1) if world % size == 0]
    # A switch in the middle of the buckets' sizes: hierarchical and ring in one step.
    choices.append({"algorithm": "hybrid", "switch_mb": 0.05})
    if len(set(nodes)) > 1:
        choices.append({"algorithm": "hierarchical"})
    return [choice | {"fusion_mb": FUSIONS_MB[i % len(FUSIONS_MB)]} for i, choice in enumerate(choices)]


@pytest.mark.parametrize("nodes", [(1, 1), (3,), (2, 2)])
def test_ring_in_the_buckets_of_ddp_is_bit_equal(ranks: RankPool, nodes: tuple[int, ...]) -> None:
    # Its rank 0: running statistics of the others are theirs until the next step.
    expected = ranks.run(train, [{"bucket_cap_mb": 0.3}], nodes=nodes, timeout=120)[0][0]
    (found,) = train_alike(ranks, [{"algorithm": "ring", "bucket_cap_mb": 0.3}], nodes)
    assert expected.num_buckets == found.num_buckets > 1
    assert found.state_digest == expected.state_digest


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (3,), (2, 2), (3, 1)])
def test_every_algorithm_and_group_size(
    ranks: RankPool, plain_ddp: Callable[[int], Trained], nodes: tuple[int, ...]
) -> None:
    strategies = strategies_for(nodes)
    for arguments, found in zip(strategies, train_alike(ranks, strategies, nodes), strict=True):
        assert error_of_update(found, plain_ddp(sum(nodes))) < 1e-5, f"{arguments} on {nodes}"


@pytest.mark.parametrize(
    ("nodes", "strategies"),
    [
        (
            (2, 2, 2),
            [
                {"algorithm": "hierarchical", "fusion_mb": 0.3},
                {"algorithm": "torus", "fusion_mb": 0.01},
                {"algorithm": "torus", "group_size": 3, "fusion_mb": 50.0},
                {"algorithm": "hierarchical", "group_size": 4, "fusion_mb": 0.01},
            ],
        ),
        (
            (4, 4),
            [
                {"algorithm": "torus", "fusion_mb": 0.3},
                {"algorithm": "hierarchical", "group_size": 3, "fusion_mb": 0.01},
                {"algorithm": "hybrid", "fusion_mb": 0.01, "switch_mb": 0.05},
            ],
        ),
    ],
)
def test_larger_worlds(
    ranks: RankPool,
    plain_ddp: Callable[[int], Trained],
    nodes: tuple[int, ...],
    strategies: list[dict[str, Any]],
) -> None:
    for arguments, found in zip(strategies, train_alike(ranks, strategies, nodes), strict=True):
        assert error_of_update(found, plain_ddp(sum(nodes))) < 1e-5, f"{arguments} on {nodes}"


@pytest.mark.parametrize(
    ("wire_dtype", "smallest_error", "largest_error"),
    # What rounding of the gradients to 11 and 8 bits must and may leave of the update. Each is bounded below as well:
    # less would mean that the wire was not in this dtype.
    [("fp16", 1e-4, 5e-3), ("bf16", 1e-3, 3e-2)],
)
@pytest.mark.parametrize("nodes", [(2, 1), (2, 2)])
def test_16_bit_wire(
    ranks: RankPool,
    plain_ddp: Callable[[int], Trained],
    nodes: tuple[int, ...],
    wire_dtype: str,
    smallest_error: float,
    largest_error: float,
) -> None:
    algorithms = ["ring", "hierarchical", "torus"] if nodes == (2, 2) else ["ring", "hierarchical"]
    strategies = [{"algorithm": algorithm, "wire_dtype": wire_dtype, "fusion_mb": 0.3} for algorithm in algorithms]
    for arguments, found in zip(strategies, train_alike(ranks, strategies, nodes), strict=True):
        error = error_of_update(found, plain_ddp(sum(nodes)))
        assert smallest_error < error < largest_error, f"{arguments} on {nodes}"
