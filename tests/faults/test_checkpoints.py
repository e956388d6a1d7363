"""Checkpoints are whole or not there, whatever happens while they are written; files that are not whole are refused."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_fourmin import LARS, FourMinPrecision, FourMinStrategy, PreemptionCheckpoint, ScalingMonitor
from lightning_fourmin.errors import CheckpointError
from lightning_fourmin.faults.checkpoint_io import PART, AtomicCheckpointIO
from tests.support.counting import Counting, numbers_module
from tests.support.half_training import trainer
from tests.support.pool import RankPool
from tests.support.ranks import rank_env
from tests.support.shards import write_numbers
from tests.support.training import Regression, data, rank_trainer

STATE = {"state_dict": {"weight": torch.arange(100_000.0)}, "pytorch-lightning_version": "2.6.0"}


def first_value(path: Path) -> float:
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    return float(loaded["state_dict"]["weight"][0])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    return path


def test_without_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "last.ckpt")
        assert first_value(tmp_path / "last.ckpt") == 0.0
        cut = tmp_path / "cut.ckpt"
        cut.write_bytes((tmp_path / "last.ckpt").read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
            AtomicCheckpointIO().load_checkpoint(cut)
    finally:
        torch.serialization.set_crc32_options(before)


KILLED_WRITER = """
import os, sys, torch
from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO

sync = os.fsync

def stop(descriptor):
    sync(descriptor)
    print("written", flush=True)
    sys.stdin.read()

os.fsync = stop
AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.full((100_000,), 7.0)}}, sys.argv[1])
"""


def test_killed_while_writing(saved: Path) -> None:
    arguments = [sys.executable, "-c", KILLED_WRITER, str(saved)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        (partial,) = saved.parent.glob(f".*{PART}")
        assert partial.stat().st_size > 400_000
        AtomicCheckpointIO().save_checkpoint(STATE, saved.parent / "other.ckpt")
        assert partial.exists(), "another process still writes it"
        writer.kill()
    assert first_value(saved) == 0
    assert partial.exists()
    AtomicCheckpointIO().save_checkpoint(STATE, saved.parent / "next.ckpt")
    assert sorted(path.name for path in saved.parent.iterdir()) == ["last.ckpt", "next.ckpt", "other.ckpt"]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder):
        path = folder / "last.ckpt"
        AtomicCheckpointIO().save_checkpoint(STATE, path)
        too_large = {"state_dict": {"weight": torch.ones(300_000)}}
        with pytest.raises(CheckpointError, match=rf"{path} could not be saved \(No space left on device\): make room"):
            AtomicCheckpointIO().save_checkpoint(too_large, path)
        assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
        assert first_value(path) == 0


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder):
        path = folder / "last.ckpt"
        AtomicCheckpointIO().save_checkpoint(STATE, path)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(CheckpointError, match=r"could not be saved \(Read-only file system\): .* give a directory"):
            AtomicCheckpointIO().save_checkpoint(STATE, path)
        assert first_value(path) == 0


def test_file_where_a_directory_should_be(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"below.ckpt could not be saved \(File exists\)"):
        AtomicCheckpointIO().save_checkpoint(STATE, saved / "below.ckpt")


def damaged(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0x40
    return {
        "cut in half": content[: len(content) // 2],
        "last byte missing": content[:-1],
        "empty": b"",
        "a bit flipped": bytes(flipped),
        "text": b"epoch,loss\n1,0.5\n",
        "a pickle": pickle.dumps({"weight": [1.0, 2.0]}),
    }


@pytest.mark.parametrize("damage", damaged(b"01"))
def test_files_that_are_no_checkpoint_are_refused(saved: Path, damage: str) -> None:
    saved.write_bytes(damaged(saved.read_bytes())[damage])
    with pytest.raises(CheckpointError, match=rf"^{saved} is not a whole checkpoint: .* from another$"):
        AtomicCheckpointIO().load_checkpoint(saved)


def test_a_file_that_may_not_be_read_is_not_called_damaged(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(zipfile, "ZipFile", refuse)  # root may read everything
    with pytest.raises(PermissionError, match=str(saved)):
        AtomicCheckpointIO().load_checkpoint(saved)


def test_foreign_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("photo", "pixels")
    with pytest.raises(CheckpointError, match=r"photos\.zip is not a whole checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_tensors_that_no_trainer_saved_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"weights\.pt was not saved by a Trainer: it has no state_dict"):
        FourMinStrategy().load_checkpoint(path)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    path, trap = tmp_path / "evil.ckpt", tmp_path / "trap"
    torch.save({"state_dict": {}, "hyper_parameters": Evil(trap)}, path)
    with pytest.raises(CheckpointError, match=r"evil\.ckpt holds a posix\.mkdir, and loading that could run code: if"):
        AtomicCheckpointIO().load_checkpoint(path)
    assert not trap.exists()
    AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    assert trap.exists()


def test_missing_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "gone.ckpt")


def test_addresses_are_left_to_lightning() -> None:
    AtomicCheckpointIO().save_checkpoint(STATE, "memory://run/last.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://run/last.ckpt")["state_dict"].keys() == {"weight"}


def test_the_users_own_way_to_save_wins() -> None:
    assert isinstance(FourMinStrategy().checkpoint_io, AtomicCheckpointIO)
    plugin = TorchCheckpointIO()
    chosen = trainer(strategy=FourMinStrategy(), plugins=[plugin])
    assert chosen.strategy.checkpoint_io is plugin
    assert FourMinStrategy(checkpoint_io=plugin).checkpoint_io is plugin
    wrapped = trainer(strategy="fourmin", plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(wrapped, AsyncCheckpointIO)
    assert isinstance(wrapped.checkpoint_io, AtomicCheckpointIO)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder, (17, 1, 14))
    return str(folder)


class WithLars(Counting):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LARS(self.parameters(), lr=0.1)


class AsksOneRank(Callback):
    """To end, as a scheduler would: in a step, or before the first."""

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


def failing_save(folder: str) -> str:
    Path(folder, "file").write_text("in the way")
    try:
        run = rank_trainer(FourMinStrategy(), max_epochs=1)
        run.fit(Regression(nn.Linear(4, 1)), data(4))
        run.save_checkpoint(f"{folder}/file/last.ckpt")
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_all_ranks_know_that_a_save_failed(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(failing_save, str(tmp_path), world=2)
    assert answers[0] == answers[1]
    assert "last.ckpt could not be saved (File exists)" in answers[0]
