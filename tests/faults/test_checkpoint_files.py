"""Checkpoint files with names as long as they may be, and of the format that torch had before 1.6."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fourmin.errors import CheckpointError
from lightning_fourmin.faults.checkpoint_io import PART, AtomicCheckpointIO
from lightning_fourmin.runs.folder import first_whole
from tests.faults.test_checkpoints import KILLED_WRITER, STATE, first_value

# Of 255 bytes; wherever the last is cut, up to three bytes are a part of a character.
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


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.ckpt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    return path


def test_old_format_is_said_so(old: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"^{old} is in torch's format of before 1\.6, which has no checksums: load"
    ):
        AtomicCheckpointIO().load_checkpoint(old)
    torch.save(torch.load(old), old.with_name("new.ckpt"))
    assert first_value(old.with_name("new.ckpt")) == 0


def test_a_resume_passes_over_the_old_format(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole or cut short: without checksums that is not known."""
    cut, whole = old.with_name("cut.ckpt"), old.with_name("whole.ckpt")
    cut.write_bytes(old.read_bytes()[:-100])
    AtomicCheckpointIO().save_checkpoint(STATE, whole)
    assert first_whole([old, cut, whole]) == whole
    assert capsys.readouterr().err.count("is in torch's format of before 1.6") == 2
