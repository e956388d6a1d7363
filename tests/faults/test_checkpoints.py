"""Checkpoints are whole or not there, whatever happens while they are written; files that are not whole are refused."""

import errno
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.errors import CheckpointError
from lightning_fourmin.faults.checkpoint_io import PART, AtomicCheckpointIO
from tests.support.half_training import trainer
from tests.support.pool import RankPool
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


# Names of 255 bytes. Wherever a name is cut, up to three bytes may be a part of a character.
LONG_NAMES = pytest.mark.parametrize(
    "name",
    [f"{'a' * 250}.ckpt", f"{chr(0x20AC) * 83}a.ckpt", f"a{chr(0x20AC) * 83}.ckpt", f"aa{chr(0x1F642) * 62}.ckpt"],
    ids=["ascii", "three bytes", "three bytes from the second", "four bytes"],
)


@LONG_NAMES
def test_long_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    AtomicCheckpointIO().save_checkpoint(STATE, path)
    assert list(tmp_path.iterdir()) == [path]
    assert first_value(path) == 0


@LONG_NAMES
def test_killed_while_writing_a_long_name(tmp_path: Path, name: str) -> None:
    arguments = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / name)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        writer.kill()
    assert len(list(tmp_path.glob(f".*{PART}"))) == 1
    AtomicCheckpointIO().save_checkpoint(STATE, tmp_path / "next.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["next.ckpt"]


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
