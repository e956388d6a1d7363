"""What works with DDPStrategy works with `fourmin` and gives the same results."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.futures import Future

from lightning_fourmin import FourMinStrategy
from tests.support.parity import Net, digest, images, relative_error, state, weights
from tests.support.pool import RankPool
from tests.support.ranks import current_case
from tests.support.training import rank_trainer

# Unequal nodes and 3 ranks: with 2 the order of a sum cannot show.
NODES = (2, 1)


class TwoHeads(Net):
    """Each step uses one of two heads, another one on the next rank."""

    def __init__(self) -> None:
        super().__init__()
        self.other_head = nn.Linear(1150, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        head = (self.head, self.other_head)[(batch_idx + self.global_rank) % 2]
        return nn.functional.cross_entropy(head(self.hidden(self.features(batch[0]))), batch[1])


class TwoOptimizers(Net):
    """Manual optimization in turns: the hidden layer with one loss, then the rest with another."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for factor, optimizer in zip((1.0, 0.5), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(factor * nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        rest = [*self.features.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(self.hidden.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.003, momentum=0.9)]


class Metrics(Net):
    """Logs what differs between the ranks, synced in several ways, and predicts."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        for how in ("max", "min", "sum"):
            self.log(f"rank_{how}", float(self.global_rank + batch_idx), reduce_fx=how, on_epoch=True, sync_dist=True)
        return loss

    def evaluate(self, batch: list[Tensor], name: str) -> None:
        self.log(name, nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val_loss")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test_loss")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def train(
    strategy: DDPStrategy, net_type: type[LightningModule] = Net, num_batches: int = 6, **trainer_kwargs: Any
) -> tuple[LightningModule, Trainer]:
    torch.manual_seed(1)
    net = net_type()
    trainer = rank_trainer(strategy, **({"max_epochs": 1} | trainer_kwargs))
    trainer.fit(net, images(num_batches), images(3) if net_type is Metrics else None)
    return net, trainer


def train_weights(strategy: DDPStrategy, *args: Any, **kwargs: Any) -> tuple[Tensor, int]:
    net, trainer = train(strategy, *args, **kwargs)
    return weights(net), trainer.global_step


def compare(run: Callable[..., Any], *args: Any, strategy: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
    """What `run` gives with plain DDP and with `fourmin`."""
    plain = DDPStrategy(**strategy or {})
    ours = FourMinStrategy(algorithm="hierarchical", fusion_mb=0.05, **strategy or {})
    return [run(plain, *args, **kwargs), run(ours, *args, **kwargs)]


@pytest.mark.parametrize(
    ("net_type", "strategy", "arguments", "num_steps"),
    [
        pytest.param(Net, {}, {"num_batches": 7, "accumulate_grad_batches": 2}, 4, id="accumulation"),
        pytest.param(TwoHeads, {"find_unused_parameters": True}, {}, 6, id="unused parameters"),
        pytest.param(Net, {"static_graph": True}, {}, 6, id="static graph"),
        pytest.param(Net, {"gradient_as_bucket_view": True}, {}, 6, id="gradients as views"),
        pytest.param(
            Net,
            {"gradient_as_bucket_view": True},
            {"num_batches": 7, "accumulate_grad_batches": 2},
            4,
            id="accumulation into views",
        ),
        pytest.param(TwoOptimizers, {"find_unused_parameters": True}, {}, 12, id="two optimizers"),
        pytest.param(Net, {}, {"gradient_clip_val": 0.1}, 6, id="clipping"),
    ],
)
def test_same_weights_as_ddp(
    ranks: RankPool,
    net_type: type[LightningModule],
    strategy: dict[str, Any],
    arguments: dict[str, Any],
    num_steps: int,
) -> None:
    answers = ranks.run(compare, train_weights, net_type, strategy=strategy, nodes=NODES, **arguments)
    for (expected, expected_steps), (found, found_steps) in answers:
        assert found_steps == expected_steps == num_steps
        assert relative_error(found, expected) < 1e-5
        assert torch.equal(found, answers[0][1][0])


class Unused(Net):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def error_of_unused_parameters() -> str:
    with pytest.raises(RuntimeError) as raised:
        train(FourMinStrategy(fusion_mb=0.05), Unused)
    return str(raised.value)


def test_unused_parameters_are_explained_with_the_names_of_this_strategy(ranks: RankPool) -> None:
    for error in ranks.run(error_of_unused_parameters, nodes=(2,)):
        assert error.startswith("It looks like your LightningModule has parameters that were not used in producing")
        assert "`strategy='fourmin_find_unused_parameters_true'`" in error
        assert "`strategy=FourMinStrategy(find_unused_parameters=True)`" in error


def average_weights(strategy: DDPStrategy, kind: str) -> Tensor:
    if kind == "ema":
        averaging: Callback = EMAWeightAveraging(decay=0.8)
    else:
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    net, _ = train(strategy, callbacks=[averaging], num_batches=3, max_epochs=3)
    return state(net)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_same_averages_as_ddp(ranks: RankPool, kind: str) -> None:
    answers = ranks.run(compare, average_weights, kind, nodes=NODES)
    # With DDP the statistics of batch norm differ between ranks; rank 0's are the ones that are kept.
    expected, found = answers[0]
    assert relative_error(found, expected) < 1e-5
    assert all(torch.equal(answer[1], found) for answer in answers)


def evaluate(strategy: DDPStrategy) -> tuple[dict[str, float], Tensor]:
    net, trainer = train(strategy, Metrics)
    metrics = {f"fit/{name}": float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= trainer.validate(net, images(3), verbose=False)[0]
    metrics |= trainer.test(net, images(3), verbose=False)[0]
    predictions = trainer.predict(net, images(3))
    assert predictions is not None
    return metrics, torch.cat(predictions)


def test_same_metrics_and_predictions_as_ddp(ranks: RankPool) -> None:
    for (expected, expected_predictions), (found, predictions) in ranks.run(compare, evaluate, nodes=NODES):
        assert {"fit/loss_step", "fit/loss_epoch", "fit/val_loss", "val_loss", "test_loss"} <= expected.keys()
        assert [expected[f"fit/rank_{how}"] for how in ("max", "min", "sum")] == [7.0, 0.0, 63.0]
        assert found == pytest.approx(expected, rel=1e-5)
        assert relative_error(predictions, expected_predictions) < 1e-5


def reduce_values(strategy: DDPStrategy) -> list[float]:
    """As callbacks and users call it, outside of logging."""
    _, trainer = train(strategy, num_batches=1)
    rank = current_case().rank
    values: list[Tensor] = []
    for dtype in (torch.float32, torch.int64):
        for how in ("mean", "avg", "sum", "max", "min", dist.ReduceOp.SUM):
            tensor = torch.tensor(3 * rank + 1, dtype=dtype)
            values.append(trainer.strategy.reduce(tensor, reduce_op=how))
            # In place, as DDP's.
            values.append(tensor)
    assert trainer.strategy.reduce("no tensor") == "no tensor"
    return [float(value) for value in values]


def test_same_reductions_as_ddp(ranks: RankPool) -> None:
    for expected, found in ranks.run(compare, reduce_values, nodes=NODES):
        assert expected[0] == 4.0
        assert found == expected


def resume(directory: str) -> tuple[list[str], list[int]]:
    """Digests after two epochs at once, and after one, a checkpoint and another."""
    strategy = {"algorithm": "hierarchical", "fusion_mb": 0.05}
    at_once, _ = train(FourMinStrategy(**strategy), max_epochs=2)
    _, first = train(FourMinStrategy(**strategy))
    path = Path(directory) / "first.ckpt"
    first.save_checkpoint(path)
    torch.manual_seed(2)
    resumed = Net()
    second = rank_trainer(FourMinStrategy(**strategy), max_epochs=2)
    second.fit(resumed, images(6), ckpt_path=path)
    return [digest(state(at_once)), digest(state(resumed))], [first.global_step, second.global_step]


def test_checkpoint_and_resume(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(resume, str(tmp_path), nodes=NODES)
    assert len({text for digests, _ in answers for text in digests}) == 1
    assert all(steps == [6, 12] for _, steps in answers)


def record_and_average(calls: list[int], bucket: dist.GradBucket) -> Future[Tensor]:
    """A user's hook."""
    calls.append(bucket.index())
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class SeeHook(Callback):
    """Keeps the name of the hook that DDP runs."""

    name = ""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        self.name = model._get_ddp_logging_data().get("comm_hook", "none")


def hook_and_log(strategy: DDPStrategy) -> tuple[str, list[str], str]:
    """Name of the hook, our lines in the log, digest of the weights."""
    log, hook = Lines(), SeeHook()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(log)
    try:
        net, _ = train(strategy, callbacks=[hook])
    finally:
        logger.removeHandler(log)
    return hook.name, [line for line in log.lines if "fourmin" in line], digest(weights(net))


def test_our_hook_took(ranks: RankPool) -> None:
    for rank, answers in enumerate(ranks.run(compare, hook_and_log, nodes=NODES)):
        (plain_name, plain_lines, _), (name, lines, _) = answers
        assert (plain_name, plain_lines) == ("none", [])
        assert "all_reduce_hook" in name
        assert len(lines) == (1 if rank == 0 else 0)


def use_own_hook() -> tuple[int, tuple[str, list[str], str], tuple[str, list[str], str]]:
    calls: list[int] = []
    ours = hook_and_log(FourMinStrategy(ddp_comm_hook=record_and_average, ddp_comm_state=calls))
    return len(calls), ours, hook_and_log(DDPStrategy())


def test_hook_of_the_user_wins(ranks: RankPool) -> None:
    for rank, (num_calls, (name, lines, found), (_, _, expected)) in enumerate(ranks.run(use_own_hook, nodes=NODES)):
        assert num_calls >= 6
        assert "record_and_average" in name
        assert len(lines) == (1 if rank == 0 else 0)
        assert all("your ddp_comm_hook is used" in line for line in lines)
        assert found == expected
