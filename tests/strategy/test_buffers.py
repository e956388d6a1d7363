"""Batch norm statistics that travel late: every rank ends, validates and freezes with what rank 0 has under ddp."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.strategy import only_batch_norm_statistics
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer


class ScaledNorm(nn.BatchNorm1d):
    """A batch norm with a buffer that is no running statistic."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("scale", torch.ones(1))


class Renorm(nn.BatchNorm1d):
    """Reads its running statistics in training."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        return super().forward(input) - self.running_mean


def with_buffer() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.register_buffer("table", torch.zeros(2))
    return module


def tied() -> nn.Module:
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(norm, nn.Linear(3, 3), norm)


MODULES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "batch norm": (lambda: nn.BatchNorm1d(3), True),
    "nested": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm3d(2))), True),
    "synchronised": (lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), True),
    "tied": (tied, True),
    "no buffers": (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), False),
    "untracked": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)), False),
    "another buffer": (with_buffer, False),
    "instance norm": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)), False),
    "weighted loss": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.CrossEntropyLoss(weight=torch.ones(3))), False),
    "subclass": (ScaledNorm, False),
    "forward of its own": (lambda: Renorm(3), False),
}


@pytest.mark.parametrize(("make", "only"), MODULES.values(), ids=MODULES.keys())
def test_only_batch_norm_statistics(make: Callable[[], nn.Module], only: bool) -> None:
    assert only_batch_norm_statistics(make()) is only


# On two ranks, against plain ddp. Two ranks have one order of summation, so both strategies agree in every bit.


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))


class Validated(Regression):
    """Keeps the statistics that each validation batch finds."""

    def __init__(self) -> None:
        super().__init__(net())
        self.seen: list[list[Tensor]] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert not self.net[1].training
        self.seen.append([buffer.clone() for buffer in self.net.buffers()])


class Freezer(Callback):
    """Switches the first batch norm to evaluation before step 2 and back before step 4."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in (2, 4):
            module.net[1].train(batch_idx == 4)


class SelfFreezing(Regression):
    """Does the same inside its step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx in (2, 4):
            self.net[1].train(batch_idx == 4)
        return super().training_step(batch, batch_idx)


class Frozen(Regression):
    """Trains with one batch norm in evaluation from the first step."""

    def on_train_epoch_start(self) -> None:
        self.net[1].eval()


class Taught(Regression):
    """A teacher that evaluates in training steps, its statistics those of the student."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.teacher = copy.deepcopy(net).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - self.teacher(batch[0]) - 1).pow(2).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        for mine, students in zip(self.teacher.buffers(), self.net.buffers(), strict=True):
            mine.copy_(students)


class Watch(Callback):
    """Keeps how DDP syncs buffers while it trains."""

    forward_sync_buffers: bool

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        self.forward_sync_buffers = trainer.strategy.model.forward_sync_buffers


def fit(
    strategy: str, model: type[Regression] = Regression, kwargs: dict[str, Any] | None = None, freeze: bool = False
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Buffers and parameters after six steps, and whether DDP synced buffers before every forward."""
    torch.manual_seed(0)
    module = model(net())
    watch = Watch()
    callbacks = [watch, Freezer()] if freeze else [watch]
    chosen = strategy if kwargs is None else FourMinStrategy(**kwargs)
    trainer = rank_trainer(chosen, max_steps=6, callbacks=callbacks)
    trainer.fit(module, data(6, num_steps=6, batch_size=4))
    assert trainer.global_step == 6
    return list(module.buffers()), [p.detach() for p in module.parameters()], watch.forward_sync_buffers


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    assert len(some) == len(others) > 0
    return all(map(torch.equal, some, others))


def test_every_rank_ends_with_the_statistics_of_rank_0(ranks: RankPool) -> None:
    ddp, ddp_1 = ranks.run(fit, "ddp")
    assert ddp[2]
    assert not equal(ddp[0], ddp_1[0]), "the data of the ranks must differ, else this tests nothing"
    for buffers, parameters, synced in ranks.run(fit, "fourmin"):
        assert not synced
        assert equal(buffers, ddp[0])
        assert equal(parameters, ddp[1])


@pytest.mark.parametrize(("model", "freeze"), [(Regression, True), (Frozen, False), (Taught, False)])
def test_batch_norm_that_evaluates_in_training_is_as_under_ddp(
    ranks: RankPool, model: type[Regression], freeze: bool
) -> None:
    ddp, _ = ranks.run(fit, "ddp", model, freeze=freeze)
    for buffers, parameters, synced in ranks.run(fit, "fourmin", model, freeze=freeze):
        assert not synced
        assert equal(buffers, ddp[0])
        assert equal(parameters, ddp[1])


class Apart(Regression):
    """Its ranks keep statistics of their own, as DDP lets them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]


def test_statistics_that_ddp_is_told_to_ignore_stay_with_their_rank(ranks: RankPool) -> None:
    expected = [buffers for buffers, *_ in ranks.run(fit, "ddp", Apart)]
    assert not equal(*expected)
    found = [buffers for buffers, *_ in ranks.run(fit, "fourmin", Apart)]
    assert all(map(equal, found, expected))


def test_freezing_batch_norm_inside_a_step_keeps_ranks_equal(ranks: RankPool) -> None:
    """The sync comes with the next step, so the numbers may differ from ddp's; the ranks may not."""
    rank_0, rank_1 = ranks.run(fit, "fourmin", SelfFreezing)
    assert not rank_0[2]
    assert equal(rank_0[0], rank_1[0])
    assert equal(rank_0[1], rank_1[1])


def test_user_s_forward_sync_buffers_is_respected(ranks: RankPool) -> None:
    ddp, ddp_1 = ranks.run(fit, "ddp")
    rank_0, rank_1 = ranks.run(fit, "fourmin", kwargs={"forward_sync_buffers": True})
    assert rank_0[2]
    assert rank_1[2]
    assert equal(rank_0[0], ddp[0])
    assert equal(rank_1[0], ddp_1[0])
    rank_0, rank_1 = ranks.run(fit, "fourmin", kwargs={"forward_sync_buffers": False})
    assert not rank_0[2]
    assert not equal(rank_0[0], rank_1[0])


def validate_in_fit(strategy: str) -> tuple[int, list[list[Tensor]], bool]:
    torch.manual_seed(0)
    module, watch = Validated(), Watch()
    trainer = rank_trainer(strategy, max_steps=4, val_check_interval=2, callbacks=[watch])
    trainer.fit(module, data(6, batch_size=4), data(6, num_steps=1, batch_size=4))
    return trainer.global_step, module.seen, watch.forward_sync_buffers


def test_validation_sees_the_statistics_of_rank_0(ranks: RankPool) -> None:
    ddp, _ = ranks.run(validate_in_fit, "ddp")
    for steps, seen, synced in ranks.run(validate_in_fit, "fourmin"):
        assert (steps, synced) == (4, False)
        # The sanity check, after two steps, after four.
        assert len(seen) == len(ddp[1]) == 3
        assert all(map(equal, seen, ddp[1]))
        assert not equal(seen[1], seen[2])


class Counted(Regression):
    """Has a buffer that its own forward reads."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("shift", torch.zeros(8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0]) + self.shift
        self.shift += out.detach().mean(0)
        return out.pow(2).mean()


def test_other_buffers_are_left_to_ddp(ranks: RankPool) -> None:
    for found, expected in zip(ranks.run(fit, "fourmin", Counted), ranks.run(fit, "ddp", Counted), strict=True):
        assert found[2]
        assert equal(found[0], expected[0])
        assert equal(found[1], expected[1])
