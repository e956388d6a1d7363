"""Runs of scripts that lose a rank: they end by themselves, or torchrun starts them again and nothing is lost."""

import re
from pathlib import Path

import pytest
from torch.distributed import HashStore

from lightning_fourmin.app.restart import newest_of_job, remember
from lightning_fourmin.checkpoints import AtomicCheckpointIO
from test_launchers import TESTS, running

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
    """Of the weights at the end of a run that ends well."""
    with running(arguments, folder) as run:
        assert run.process.wait(240) == 0, run.output
        assert run.left() == []
        (found,) = re.findall(r"checksum (\w+)", run.output)
        return found


def seen(folder: Path) -> dict[int, list[int]]:
    """The samples of each epoch; of steps that were done again, what they saw the last time."""
    numbers: dict[int, list[int]] = {}
    for file in folder.glob("rank*.txt"):
        lines = [line.split() for line in file.read_text().splitlines()]
        for _, epoch, *samples in {step: (step, *rest) for step, *rest in lines}.values():
            numbers.setdefault(int(epoch), []).extend(map(int, samples))
    return numbers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    return checksum([SCRIPT, "2", str(folder)], folder)


def test_torchrun_goes_on_where_a_killed_rank_left_off(undisturbed: str, tmp_path: Path) -> None:
    arguments = [*torchrun("--max-restarts", "2"), SCRIPT, "2", str(tmp_path), "1:7:SIGKILL:10", "0:16:SIGKILL:0"]
    assert checksum(arguments, tmp_path) == undisturbed
    for epoch, numbers in seen(tmp_path).items():
        assert len(numbers) == len(set(numbers)) == NUM_STEPS * 128, f"epoch {epoch}"
    again = [line.split()[0] for line in (tmp_path / "rank0.txt").read_text().splitlines()]
    assert len(again) > 2 * NUM_STEPS, "steps after the last checkpoint are done again"


def test_checkpoints_of_others_are_left_alone(tmp_path: Path) -> None:
    store, last = HashStore(), tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, last)
    remember(store, tmp_path)
    assert newest_of_job(store) is None
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, last)
    remember(store, tmp_path)
    assert newest_of_job(store) == last


def test_sigterm_to_all_processes_saves_before_they_end(undisturbed: str, tmp_path: Path) -> None:
    with running([SCRIPT, "2", str(tmp_path), "0:7:SIGTERM:0:group"], tmp_path) as run:
        assert run.process.wait(120) == 143, run.output
        assert run.left() == []
        assert re.search(r"asked to end by SIGTERM: saved .*last.ckpt after step 8", run.output), run.output
    assert checksum([SCRIPT, "2", str(tmp_path)], tmp_path) == undisturbed


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_of_a_script_end_when_one_is_killed(tmp_path: Path, victim: int) -> None:
    with running([SCRIPT, "2", str(tmp_path), f"{victim}:5:SIGKILL:5"], tmp_path) as run:
        run.wait_until((tmp_path / f"{victim}:5:SIGKILL:5.done").exists)
        run.process.wait(15)
        assert run.left() == []
        assert re.search(rf"^(\[rank\d\]: )?[\w.]+: rank {victim} is gone", run.output, re.MULTILINE), run.output
        assert run.process.returncode != 0
