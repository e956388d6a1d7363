"""Runs that are asked to end save and end together, and go on where they were; also saves in the midst of an epoch."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_fourmin import LARS, FourMinPrecision, FourMinStrategy, PreemptionCheckpoint, ScalingMonitor, _lightning
from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO
from tests.support.counting import Counting, numbers_module
from tests.support.half_training import Net, images, trainer
from tests.support.pool import RankPool
from tests.support.ranks import rank_env
from tests.support.shards import write_numbers
from tests.support.training import rank_trainer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder, (17, 1, 14))
    return str(folder)


class WithLars(Counting):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LARS(self.parameters(), lr=0.1)


class AsksOneRank(Callback):
    """Asks rank 1 to end, as a scheduler would: in a step, or before the first."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1 and self._step is None:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


class AtEveryStep(PreemptionCheckpoint):
    interval_s = 0.0


class AskedWhileItAsks(AtEveryStep):
    """One rank gets its SIGTERM when it has told the others that it has none."""

    def _agree(self, trainer: Trainer) -> None:
        reduce = trainer.strategy.reduce

        def asked_now(*args: Any, **kwargs: Any) -> Any:
            if trainer.global_rank == 1 and trainer.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return reduce(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.strategy, "reduce", asked_now)
            super()._agree(trainer)


class AtTheEndOfEpochs(PreemptionCheckpoint):
    """The next question would come after more steps than the run has."""

    interval_s = 1000.0


def train(path: str, callbacks: list[Callback], resume: Path | None = None) -> Any:
    """Weights after two epochs and what this rank saw; the exit code if it was asked to end."""
    torch.manual_seed(1)
    module = WithLars()
    run = rank_trainer(
        FourMinStrategy(),
        max_epochs=2,
        limit_val_batches=0,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        plugins=[rank_env(), FourMinPrecision()],
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        run.fit(module, numbers_module(path, 2), ckpt_path=resume)
    except SIGTERMException as ended:
        assert signal.getsignal(signal.SIGTERM) is before
        return ended.code, module.seen
    return torch.cat([p.detach().flatten() for p in module.parameters()]), module.seen


def numbers(answers: list[Any]) -> list[tuple[int, int]]:
    return sorted((epoch, number) for _, seen in answers for epoch, batch in seen for number in batch)


def test_sigterm_at_one_rank_saves_and_ends_all(ranks: RankPool, path: str, tmp_path: Path) -> None:
    undisturbed = ranks.run(train, path, [], world=2)
    first = ranks.run(train, path, [AsksOneRank(1), AtEveryStep(tmp_path)], world=2)
    assert [code for code, _ in first] == [143, 143]
    saved = tmp_path / "last.ckpt"
    state = AtomicCheckpointIO().load_checkpoint(saved)
    assert (state["global_step"], state["epoch"]) == (2, 0), "in the middle of the epoch, after the step was done"
    second = ranks.run(train, path, [], resume=saved, world=2)
    for (weights, _), (expected, _) in zip(second, undisturbed, strict=True):
        assert torch.equal(weights, expected)
    assert numbers([*first, *second]) == numbers(undisturbed)


def test_sigterm_while_ranks_ask_each_other_is_answered_next_time(ranks: RankPool, path: str, tmp_path: Path) -> None:
    answers = ranks.run(train, path, [AskedWhileItAsks(tmp_path)], world=2)
    assert [code for code, _ in answers] == [143, 143]
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2


@pytest.mark.parametrize(("asked_at", "num_steps"), [(2, 5), (7, 8)])
def test_sigterm_before_the_end_of_an_epoch_or_of_the_run(
    ranks: RankPool, path: str, tmp_path: Path, asked_at: int, num_steps: int
) -> None:
    """After the epoch one more step is done; after the last there is none."""
    answers = ranks.run(train, path, [AsksOneRank(asked_at), AtTheEndOfEpochs(tmp_path)], world=2)
    assert [code for code, _ in answers] == [143, 143]
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == num_steps
    resumed = ranks.run(train, path, [], resume=tmp_path / "last.ckpt", world=2)
    assert numbers([*answers, *resumed]) == numbers(ranks.run(train, path, [], world=2))


def questions_before_batches(path: str, callbacks: list[Callback]) -> int:
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda loop: asked.append(loop))
        train(path, callbacks)
    return len(asked)


def test_lightnings_broadcast_before_every_batch_is_spared(ranks: RankPool, path: str) -> None:
    assert ranks.run(questions_before_batches, path, [], world=2) == [16] * 2
    for callbacks in ([PreemptionCheckpoint()], [PreemptionCheckpoint(), ScalingMonitor()]):
        assert ranks.run(questions_before_batches, path, callbacks, world=2) == [0] * 2
        assert ranks.run(questions_before_batches, path, callbacks[::-1], world=2) == [0] * 2


def save_at_address(path: str) -> list[str]:
    train(path, [AsksOneRank(1), AtEveryStep("memory://bucket/run")])
    return sorted(str(name) for name in get_filesystem("memory://").find("/bucket"))


def test_an_address_to_save_at_stays_one(ranks: RankPool, path: str) -> None:
    first, _ = ranks.run(save_at_address, path, world=2)
    assert first == ["/bucket/run/last.ckpt"]
    assert not Path("memory:").exists()


def test_sigterm_before_the_first_step(ranks: RankPool, path: str, tmp_path: Path) -> None:
    answers = ranks.run(train, path, [AsksOneRank(None), PreemptionCheckpoint(tmp_path)], world=2)
    assert answers == [(143, [])] * 2
    assert list(tmp_path.iterdir()) == []


def test_every_n_minutes_in_the_middle_of_an_epoch(ranks: RankPool, path: str, tmp_path: Path) -> None:
    by_time = ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), save_top_k=-1)
    undisturbed = ranks.run(train, path, [by_time], world=2)
    saved = sorted(tmp_path.glob("*.ckpt"))
    assert [file.name for file in saved] == [f"epoch={step // 4}-step={step + 1}.ckpt" for step in range(8)]
    only_state = ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), save_top_k=0)
    second = ranks.run(train, path, [only_state], resume=saved[1], world=2)
    for (weights, seen), (expected, all_seen) in zip(second, undisturbed, strict=True):
        assert torch.equal(weights, expected)
        assert seen == all_seen[4:]


# The exit code, with the exceptions of Lightning 2.6 and of what comes after it.


class OfLightning26(SIGTERMException):
    """Takes the exit code, as any SystemExit does."""

    def __init__(self, *args: object) -> None:
        SystemExit.__init__(self, *args)


class OfLightning27(SIGTERMException):
    """Takes nothing and knows its exit code, as on Lightning's main branch."""

    def __init__(self) -> None:
        SystemExit.__init__(self, 128 + signal.SIGTERM)


class AsksToEnd(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")
@pytest.mark.parametrize("of_lightning", [OfLightning26, OfLightning27])
def test_a_run_that_is_asked_to_end_exits_with_143(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_lightning: type[SystemExit]
) -> None:
    monkeypatch.setattr(_lightning, "SIGTERMException", of_lightning)
    run = trainer(callbacks=[AsksToEnd(), PreemptionCheckpoint(tmp_path)])
    with pytest.raises(SIGTERMException) as ended:
        run.fit(Net(), images(4))
    assert type(ended.value) is of_lightning
    assert ended.value.code == 143
    assert (tmp_path / "last.ckpt").is_file()
