"""A phase that waits long: every rank that waits says where, and who has not arrived. Ranks are really stopped."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_fourmin import faults
from lightning_fourmin.allreduce.algorithms import ALGORITHMS
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.faults.missing_ranks import MissingRanks, Wait
from lightning_fourmin.text import rank_list
from tests.allreduce.test_engine import engine
from tests.allreduce.test_engine_errors import wait_for_threads
from tests.support.pool import RankPool
from tests.support.ranks import ADDRESS, current_case
from tests.support.teardown import group_of

LIMIT_S = 0.4
TIMEOUT_S = 2.0


@contextmanager
def warnings_said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_fourmin.faults.missing_ranks")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextmanager
def stopped(rank: int) -> Iterator[None]:
    """Stops the process of a rank with SIGSTOP; rank 0 (1 for rank 0) lets it go on when it leaves the context."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    me, waker = dist.get_rank(), 1 if rank == 0 else 0
    if me == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        yield
    finally:
        if me == waker:
            os.kill(pids[rank], signal.SIGCONT)


def submit_while_one_is_stopped(algorithm: str, rank: int) -> tuple[list[str], bool]:
    """Warnings of this rank, and whether the mean is right in the end."""
    with (
        warnings_said() as lines,
        closing(MissingRanks(LIMIT_S)) as missing_ranks,
        engine(algorithm, missing_ranks=missing_ranks, shared_bytes=8192) as made,
    ):
        mean = made.submit(torch.full((100,), float(dist.get_rank())), 0).wait()
        with stopped(rank):
            future = made.submit(torch.full((100,), float(dist.get_rank())), 7)
            deadline = time.monotonic() + 30
            while not lines and time.monotonic() < deadline and dist.get_rank() != rank:
                time.sleep(0.01)
            # All have warned before the stopped one goes on.
            time.sleep(0.5)
        right = bool((future.wait() == 1.5).all()) and bool((mean == 1.5).all())
        made.raise_error()
    return lines, right


@pytest.mark.parametrize(("algorithm", "rank"), [("hierarchical", 3), ("torus", 0), ("ring", 2)])
def test_every_waiting_rank_names_the_one_that_is_stopped(ranks: RankPool, algorithm: str, rank: int) -> None:
    answers = ranks.run(submit_while_one_is_stopped, algorithm, rank, nodes=[2, 2])
    assert all(right for _, right in answers)
    for waiting, (lines, _) in enumerate(answers):
        if waiting == rank:
            continue
        assert len(lines) == 1, lines
        assert lines[0].startswith("bucket 7, phase ")
        assert f" of the {algorithm} all-reduce among ranks " in lines[0]
        assert f"has waited for more than {LIMIT_S} s; not arrived: rank {rank} (slow, stopped or gone?)" in lines[0]
    if algorithm == "ring":
        assert "phase scatter of the ring all-reduce among ranks 0-3" in answers[0][0][0]


def stopped_while_it_waits() -> tuple[list[str], bool]:
    """Ranks 0 and 2 wait for rank 1, and say so; then it stops rank 2 and arrives itself."""
    me = dist.get_rank()
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    # With less, a rank on a busy machine that has not posted for two seconds would count as stopped, too.
    with (
        warnings_said() as lines,
        closing(MissingRanks(4.0)) as missing_ranks,
        engine("hierarchical", missing_ranks=missing_ranks) as made,
    ):
        if me == 1:
            while [bool(waits) for (waits,) in missing_ranks._board.columns("waits")] != [True, False, True]:
                time.sleep(0.05)
            os.kill(pids[2], signal.SIGSTOP)
            # On a busy machine a signal takes effect late: rank 2 would go on and nobody would wait for it.
            while Path(f"/proc/{pids[2]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
        # Each rank sums a part, so nobody is done without rank 2.
        future = made.submit(torch.full((100_000,), float(me)), 7)
        if me == 1:
            deadline = time.monotonic() + 30
            while not lines and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(pids[2], signal.SIGCONT)
        right = bool((future.wait() == 1.0).all())
    return lines, right


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sees in /proc that a rank is stopped")
def test_a_rank_that_is_stopped_while_it_waits_is_named(ranks: RankPool) -> None:
    answers = ranks.run(stopped_while_it_waits, nodes=[1, 1, 1])
    assert all(right for _, right in answers)
    assert [line.partition("; ")[2] for line in answers[1][0]] == ["not arrived: rank 2 (slow, stopped or gone?)"]


def time_out_while_one_is_stopped(algorithm: str, rank: int) -> tuple[str, list[str], list[str]]:
    """Type of the error, its notes, threads that are left."""
    error = None
    with (
        closing(MissingRanks(LIMIT_S)) as missing_ranks,
        engine(algorithm, timeout_s=TIMEOUT_S, missing_ranks=missing_ranks, shared_bytes=8192) as made,
        stopped(rank),
    ):
        made.submit(torch.ones(100), 7).wait()
        try:
            made.raise_error()
        except RuntimeError as raised:
            error = raised
        # All have failed before the stopped one goes on.
        time.sleep(0.5)
    return type(error).__name__, getattr(error, "__notes__", []), wait_for_threads()


@pytest.mark.parametrize(("algorithm", "rank"), [("hierarchical", 3), ("ring", 1)])
def test_the_error_at_the_timeout_says_the_same(ranks: RankPool, algorithm: str, rank: int) -> None:
    answers = ranks.run(time_out_while_one_is_stopped, algorithm, rank, nodes=[2, 2], timeout=40)
    for waiting, (error, notes, threads) in enumerate(answers):
        assert threads == []
        if waiting != rank:
            # Inside a node the rank is known: it has not written to its pipe.
            assert error in ("RuntimeError", "LostRankError")
            assert notes[0].startswith("in bucket 7, phase ")
            assert notes[1] == f"not arrived: rank {rank} (slow, stopped or gone?)"


def late_but_alive() -> list[str]:
    """Rank 1 computes for longer than the limit before it hands over its bucket."""
    with (
        warnings_said() as lines,
        closing(MissingRanks(LIMIT_S)) as missing_ranks,
        engine("hierarchical", missing_ranks=missing_ranks) as made,
    ):
        if current_case().rank == 1:
            time.sleep(1.0)
        made.submit(torch.ones(1000), 0).wait()
    return lines


def test_a_long_wait_is_said_once_while_it_lasts(ranks: RankPool) -> None:
    waiting, late = ranks.run(late_but_alive, nodes=[1, 1])
    assert late == []
    assert len(waiting) == 1
    assert waiting[0].endswith(
        "phase scatter of the hierarchical all-reduce among ranks 0-1 has waited for more than 0.4 s; not arrived: "
        "rank 1 (slow, stopped or gone?)"
    )


class Waits:
    """Waits for bucket 3, from long ago on."""

    def __init__(self) -> None:
        self.wait = Wait(time.monotonic() - 100, "bucket 3", 1)

    def waits(self) -> list[Wait]:
        return [self.wait]

    def fail(self, error: LostRankError) -> None:
        raise NotImplementedError


def on_the_board(asking: int, until: str) -> str | None:
    """Who is missing to one rank when the others have posted nothing, when they do so no more, and when they leave."""
    waits = Waits()
    with closing(MissingRanks(LIMIT_S)) as missing_ranks:
        if until != "nothing" and dist.get_rank() != asking:
            missing_ranks.watch(waits)
            while not missing_ranks._board.columns("waits")[dist.get_rank()][0]:
                time.sleep(0.05)
            if until == "left":
                missing_ranks.explain_wait(waits.wait)
            missing_ranks.close()
        dist.barrier()
        found = missing_ranks.explain_wait(waits.wait) if dist.get_rank() == asking else None
        dist.barrier()
    return found


def test_who_has_posted_nothing_or_nothing_new_has_not_arrived(ranks: RankPool) -> None:
    assert [ranks.run(on_the_board, 1, until, world=3)[1] for until in ("nothing", "posted", "left")] == [
        "not arrived: ranks 0, 2 (slow, stopped or gone?)",
        "not arrived: ranks 0, 2 (slow, stopped or gone?)",
        "all ranks have arrived and wait, so look at the network (rank 0: bucket 3; rank 2: bucket 3)",
    ]


STORE_HOST = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def store_host() -> Iterator[tuple[int, int]]:
    """Port and process of a store that may be stopped, as it is when rank 0 hosts it."""
    with subprocess.Popen([sys.executable, "-c", STORE_HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        try:
            yield int(host.stdout.readline()), host.pid
        finally:
            host.kill()


def wait_while_the_store_is_stopped(port: int, host: int) -> tuple[list[str], str, bool]:
    """Rank 0 stops the store and waits for rank 1: what it is told, now and by an error, and whether it goes on."""
    me = dist.get_rank()
    error = RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer")
    with pytest.MonkeyPatch.context() as patch, group_of(dist.TCPStore(ADDRESS, port, is_master=False)):
        patch.setattr(faults.missing_ranks, "STORE_ANSWER_S", 1.0)
        with (
            warnings_said() as lines,
            closing(MissingRanks(LIMIT_S)) as missing_ranks,
            engine("hierarchical", missing_ranks=missing_ranks) as made,
        ):
            dist.barrier()
            if me == 0:
                os.kill(host, signal.SIGSTOP)
                future = made.submit(torch.ones(100), 7)
                deadline = time.monotonic() + 30
                while not lines and time.monotonic() < deadline:
                    time.sleep(0.01)
                missing_ranks.explain(error)
                os.kill(host, signal.SIGCONT)
            dist.barrier()
            if me == 1:
                future = made.submit(torch.ones(100), 7)
            right = bool((future.wait() == 1).all())
    return lines, str(error), right


def test_a_store_that_is_stopped_holds_up_nobody(ranks: RankPool, store_host: tuple[int, int]) -> None:
    (lines, error, right), (_, _, other_right) = ranks.run(wait_while_the_store_is_stopped, *store_host, nodes=[1, 1])
    assert [line.partition("; ")[2] for line in lines] == [
        "it waits for rank 1; the store, which knows about the others, does not answer"
    ]
    assert error == (
        "rank 0 is gone: the store of the process group, which lives in its process (under torchrun in the agent of "
        "the first node), does not answer; resume from the last checkpoint "
        "[gloo/transport/tcp/pair.cc: Connection reset by peer]"
    )
    assert right
    assert other_right


def test_ranks_in_words() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list([0, 1]) == "ranks 0-1"
    assert rank_list([0, 2, 3, 4, 9]) == "ranks 0, 2-4, 9"


def test_ranks_of_a_phase() -> None:
    topology = Topology.build([0, 0, 1, 1])
    assert ALGORITHMS["ring"].peers("scatter", topology, 1) == (0, 1, 2, 3)
    assert ALGORITHMS["hierarchical"].peers("reduce", topology, 3) == (2, 3)
    assert ALGORITHMS["hierarchical"].peers("gather", topology, 2) == (0, 2)
    assert ALGORITHMS["torus"].peers("scatter", topology, 3) == (1, 3)
    assert ALGORITHMS["torus"].peers("broadcast", topology, 0) == (0, 1)
