"""Bells between the ranks of a node: heard once and in order, and a missing or strange ringer is named."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fourmin.allreduce.members import Members
from lightning_fourmin.allreduce.ready_pipes import Bells

RANKS = (4, 5, 6)
NO_GROUP: Any = None


@pytest.fixture
def bells() -> Iterator[list[Bells]]:
    """Of three members; their pipes are real, only their processes are one."""
    everyones = [Bells(Members(NO_GROUP, RANKS, place), timeout_s=0.2) for place in range(3)]
    for mine in everyones:
        mine.make()
    for mine in everyones:
        mine.open([other.paths for other in everyones])
    for mine in everyones:
        mine.keep_own_ends()
    yield everyones
    for mine in everyones:
        mine.close()


def test_each_pair_has_a_pipe_of_its_own(bells: list[Bells]) -> None:
    bells[0].ring(2, 10)
    bells[0].ring(2, 11)
    bells[1].ring(2, 10)
    bells[2].ring(0, 10)
    bells[2].hear(1, 10)
    bells[2].hear(0, 10)
    bells[2].hear(0, 11)
    bells[0].hear(2, 10)


def test_silence_names_the_rank(bells: list[Bells]) -> None:
    bells[1].ring(0, 1)
    with pytest.raises(RuntimeError, match=r"^rank 6 was not ready within 0.2 s$"):
        bells[0].hear(2, 1)


def test_a_ringer_that_is_gone_is_named_after_its_last_ring(bells: list[Bells]) -> None:
    bells[1].ring(0, 7)
    bells[1].close()
    bells[0].hear(1, 7)
    with pytest.raises(RuntimeError, match=r"^rank 5 is gone: "):
        bells[0].hear(1, 8)
    with pytest.raises(RuntimeError, match=r"^rank 5 is gone: "):
        bells[0].ring(1, 8)


def test_a_rank_at_another_piece_is_refused(bells: list[Bells]) -> None:
    bells[1].ring(0, 3)
    with pytest.raises(
        RuntimeError, match=r"rank 5 is at piece 3 of its gradients, this rank at piece 2: .* same module"
    ):
        bells[0].hear(1, 2)


def test_waits_come_with_the_rank(bells: list[Bells]) -> None:
    bells[1].ring(0, 3)
    (rank, bell), silent = bells[0].from_each([1, 2], 3)
    assert (rank, silent[0]) == (5, 6)
    bell.wait()
    with pytest.raises(RuntimeError, match="rank 6"):
        silent[1].wait()


def open_pipes() -> int:
    return sum(os.readlink(path).startswith("pipe:") for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_no_pipe_stays_open() -> None:
    before = open_pipes()
    alone = Bells(Members(NO_GROUP, RANKS, 0), timeout_s=1.0)
    alone.make()
    assert open_pipes() == before + 4
    alone.close()
    assert open_pipes() == before
