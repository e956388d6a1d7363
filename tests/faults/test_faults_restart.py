"""Runs of scripts that lose a rank: they end by themselves, or torchrun starts them again and nothing is lost."""

import re
from pathlib import Path

import pytest
from torch.distributed import HashStore

from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO
from lightning_fourmin.runs.folder import STORE_KEY, make_room, overrides_after
from tests.faults.test_launchers import TESTS, running

SCRIPT = str(TESTS / "scripts" / "survive.py")
NUM_SAMPLES = 1437
NUM_STEPS = 11
"""Steps an epoch with a global batch of 128."""


def torchrun(*options: str) -> list[str]:
    return [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local_addr",
        "127.0.0.1",
        "--nproc_per_node",
        "2",
        *options,
    ]


def checksum(arguments: list[str], folder: Path) -> str:
    """The checksum of the weights at the end of a run that ends well."""
    with running(arguments, folder) as run:
        assert run.process.wait(240) == 0, run.output
        assert run.left() == []
        (found,) = re.findall(r"checksum (\w+)", run.output)
        return found


def seen(folder: Path) -> dict[int, list[int]]:
    """The samples of each epoch; for steps that were done again, what they saw the last time."""
    numbers: dict[int, list[int]] = {}
    for file in folder.glob("rank*.txt"):
        lines = [line.split() for line in file.read_text().splitlines()]
        for _, epoch, *samples in {step: (step, *rest) for step, *rest in lines}.values():
            numbers.setdefault(int(epoch), []).extend(map(int, samples))
    return numbers


def test_torchrun_goes_on_where_a_killed_rank_left_off(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    undisturbed = checksum([SCRIPT, "2", str(whole)], whole)
    arguments = [*torchrun("--max-restarts", "2"), SCRIPT, "2", str(killed), "1:7:SIGKILL:10", "0:16:SIGKILL:0"]
    assert checksum(arguments, killed) == undisturbed
    for epoch, numbers in seen(killed).items():
        assert len(numbers) == len(set(numbers)) == NUM_STEPS * 128, f"epoch {epoch}"
    again = [line.split()[0] for line in (killed / "rank0.txt").read_text().splitlines()]
    assert len(again) > 2 * NUM_STEPS, "steps after the last checkpoint are done again"


def test_checkpoints_of_others_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, last = HashStore(), tmp_path / "checkpoints" / "last.ckpt"
    assert overrides_after(store) == []
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, last)
    # An attempt that begins sets them aside before it leaves its folder in the store.
    make_room(tmp_path, None)
    store.set(STORE_KEY, str(tmp_path))
    assert overrides_after(store) == [f"run_dir={tmp_path}"]
    assert "torchrun has started this job again: there is nothing to go on from" in capsys.readouterr().err
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, last)
    assert overrides_after(store) == [f"run_dir={tmp_path}", f"resume={last}"]
    assert (tmp_path / "earlier-1" / "checkpoints" / "last.ckpt").is_file()


def test_a_job_whose_checkpoints_are_all_damaged_begins_afresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, last = HashStore(), tmp_path / "checkpoints" / "last.ckpt"
    store.set(STORE_KEY, str(tmp_path))
    last.parent.mkdir()
    last.write_text("cut short")
    assert overrides_after(store) == [f"run_dir={tmp_path}"]
    said = capsys.readouterr().err
    assert "last.ckpt is not a whole checkpoint" in said
    assert "torchrun has started this job again: there is nothing to go on from, it begins afresh" in said
    assert (tmp_path / "earlier-1" / "checkpoints" / "last.ckpt").read_text() == "cut short"


def check_end_when_killed(folder: Path, victim: int) -> None:
    with running([SCRIPT, "2", str(folder), f"{victim}:5:SIGKILL:5"], folder) as run:
        run.wait_until((folder / f"{victim}:5:SIGKILL:5.done").exists)
        run.process.wait(15)
        assert run.left() == []
        assert re.search(rf"^(\[rank\d\]: )?[\w.]+: rank {victim} is gone", run.output, re.MULTILINE), run.output
        assert run.process.returncode != 0


def test_ranks_of_a_script_end_when_rank_0_is_killed(tmp_path: Path) -> None:
    check_end_when_killed(tmp_path, 0)
