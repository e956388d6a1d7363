"""ReadyPipes between the ranks of a node: heard once and in order, and a missing or strange ringer is named."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fourmin.allreduce.process_groups import Members
from lightning_fourmin.allreduce.shared_memory import ReadyPipes

RANKS = (4, 5, 6)
NO_GROUP: Any = None


@pytest.fixture
def pipes() -> Iterator[list[ReadyPipes]]:
    """Of three members; their pipes are real, only their processes are one."""
    everyones = [ReadyPipes(Members(NO_GROUP, RANKS, place), timeout_s=0.2) for place in range(3)]
    for mine in everyones:
        mine.make()
    for mine in everyones:
        mine.open([other.paths for other in everyones])
    for mine in everyones:
        mine.keep_own_ends()
    yield everyones
    for mine in everyones:
        mine.close()


def test_each_pair_has_a_pipe_of_its_own(pipes: list[ReadyPipes]) -> None:
    pipes[0].signal(2, 10)
    pipes[0].signal(2, 11)
    pipes[1].signal(2, 10)
    pipes[2].signal(0, 10)
    pipes[2].wait_for(1, 10)
    pipes[2].wait_for(0, 10)
    pipes[2].wait_for(0, 11)
    pipes[0].wait_for(2, 10)


def test_silence_names_the_rank(pipes: list[ReadyPipes]) -> None:
    pipes[1].signal(0, 1)
    with pytest.raises(RuntimeError, match=r"^rank 6 was not ready within 0.2 s$"):
        pipes[0].wait_for(2, 1)


def test_a_writer_that_is_gone_is_named_after_its_last_signal(pipes: list[ReadyPipes]) -> None:
    pipes[1].signal(0, 7)
    pipes[1].close()
    pipes[0].wait_for(1, 7)
    with pytest.raises(RuntimeError, match=r"^rank 5 is gone: "):
        pipes[0].wait_for(1, 8)
    with pytest.raises(RuntimeError, match=r"^rank 5 is gone: "):
        pipes[0].signal(1, 8)


def test_a_rank_at_another_piece_is_refused(pipes: list[ReadyPipes]) -> None:
    pipes[1].signal(0, 3)
    with pytest.raises(
        RuntimeError, match=r"rank 5 is at piece 3 of its gradients, this rank at piece 2: .* same module"
    ):
        pipes[0].wait_for(1, 2)


def test_waits_come_with_the_rank(pipes: list[ReadyPipes]) -> None:
    pipes[1].signal(0, 3)
    (rank, signal), silent = pipes[0].signals_from([1, 2], 3)
    assert (rank, silent[0]) == (5, 6)
    signal.wait()
    with pytest.raises(RuntimeError, match="rank 6"):
        silent[1].wait()


def open_pipes() -> int:
    return sum(os.readlink(path).startswith("pipe:") for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_no_pipe_stays_open() -> None:
    before = open_pipes()
    alone = ReadyPipes(Members(NO_GROUP, RANKS, 0), timeout_s=1.0)
    alone.make()
    assert open_pipes() == before + 4
    alone.close()
    assert open_pipes() == before
