"""A phase that fails: its error is raised as itself, nobody hangs, and the next fit starts with fresh groups."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.measure_table import through
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from tests.allreduce.test_engine import engine
from tests.support.parity import Net, digest, images, state, weights
from tests.support.pool import RankPool
from tests.support.ranks import current_case
from tests.support.training import rank_trainer

BAD_RANK = 1
BAD_BUCKET = 3
TIMEOUT_S = 3.0


@contextmanager
def failing_phase(stage: str, bucket: int = BAD_BUCKET) -> Iterator[None]:
    """On one rank, a stage raises when it comes to a bucket."""
    advance = Engine.advance

    def fail(self: Engine, piece: Any, at: str, *args: Any, **kwargs: Any) -> None:
        if current_case().rank == BAD_RANK and piece.bucket.index == bucket and at == stage:
            raise ValueError("boom")
        advance(self, piece, at, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "advance", fail)
        yield


def wait_for_threads() -> list[str]:
    """Stages that are blocked in the backend end when their timeout has passed; names of those that do not."""
    deadline = time.monotonic() + 4 * TIMEOUT_S
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("fourmin-")]
        if not left:
            return []
        time.sleep(0.05)
    return left


def submit_with_failure(stage: str, shared_bytes: int) -> tuple[str, list[str], int, list[str]]:
    """Type and text of the error, its notes, number of futures that are done, threads that are left."""
    with failing_phase(stage), engine("hierarchical", timeout_s=TIMEOUT_S, shared_bytes=shared_bytes) as made:
        futures = [made.submit(torch.ones(100), index) for index in range(6)]
        for future in futures:
            future.wait()
        error = None
        try:
            made.raise_error()
        except Exception as raised:
            error = raised
        assert error is None or made.submit(torch.ones(100), 6).done()
    num_done = sum(future.done() for future in futures)
    return repr(error), getattr(error, "__notes__", []), num_done, wait_for_threads()


@pytest.mark.parametrize("shared_bytes", [0, 8192])
@pytest.mark.parametrize(("nodes", "stage"), [((2, 2), "reduce"), ((1, 1), "scatter"), ((2,), "broadcast")])
def test_error_of_a_phase_is_raised_as_itself(
    ranks: RankPool, nodes: tuple[int, ...], stage: str, shared_bytes: int
) -> None:
    answers = ranks.run(submit_with_failure, stage, shared_bytes, nodes=nodes)
    error, notes, _, _ = answers[BAD_RANK]
    assert error == "ValueError('boom')"
    assert len(notes) == 1
    assert all(word in notes[0] for word in (f"bucket {BAD_BUCKET}", f"phase {stage}", "hierarchical"))
    for _, _, num_done, threads in answers:
        assert num_done == 6
        assert threads == []
    if stage != "broadcast":
        # In a broadcast the bad rank only receives: peers may have all they need.
        assert all("Error(" in error for error, _, _, _ in answers)


def time_with_failure() -> str:
    with engine("hierarchical", timeout_s=TIMEOUT_S) as made, failing_phase("reduce", bucket=0):
        try:
            through(made)(torch.ones(100))
        except Exception as error:
            return repr(error)
    return "timed"


def test_an_all_reduce_that_failed_is_not_timed(ranks: RankPool) -> None:
    answers = ranks.run(time_with_failure, nodes=(2, 2))
    assert answers[BAD_RANK] == "ValueError('boom')"
    assert "timed" not in answers


def fit() -> tuple[str, int, int]:
    """Digest of the state, the groups' identity, and how many groups torch has."""
    torch.manual_seed(1)
    net = Net()
    strategy = FourMinStrategy(algorithm="hierarchical", fusion_mb=0.01, timeout=timedelta(seconds=TIMEOUT_S))
    rank_trainer(strategy, max_epochs=1).fit(net, images(6))
    return digest(state(net)), id(ProcessGroups._cached), len(dist.distributed_c10d._world.pg_map)


def fit_fail_and_fit() -> tuple[tuple[str, int, int], tuple[str, int, int], str, list[str], tuple[str, int, int]]:
    first, second = fit(), fit()
    kept = ProcessGroups._cached
    with failing_phase("reduce"), pytest.raises(Exception) as raised:  # noqa: PT011
        fit()
    assert ProcessGroups._cached is kept
    return first, second, repr(raised.value), wait_for_threads(), fit()


def test_failed_fit_raises_everywhere_and_the_next_one_works(ranks: RankPool) -> None:
    answers = ranks.run(fit_fail_and_fit, nodes=(2, 2), timeout=100)
    assert answers[BAD_RANK][2] == "ValueError('boom')"
    for first, second, error, threads, third in answers:
        assert second == first, "the groups of the first fit serve the second"
        assert "Error(" in error
        assert threads == []
        assert third[0] == first[0] == answers[0][0][0]
        assert third[1] != first[1], "messages of the failed fit could reach the groups' next user"


class OwnBackward(Net):
    """Manual optimization that does not go through the strategy's backward pass; the engine fails before one."""

    fails_at = 2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if batch_idx == self.fails_at:
            self.trainer.strategy._engine.fail(ValueError("boom"))
        super().training_step(batch, batch_idx).backward()
        self.before_step = weights(self)
        optimizer.step()


def fit_with_own_backward(trace: bool) -> tuple[str, int, bool]:
    """The error, how many steps were done, and whether the last one was not."""
    net = OwnBackward()
    run = rank_trainer(FourMinStrategy(trace=trace), max_epochs=1)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        run.fit(net, images(6))
    return repr(raised.value), run.global_step, torch.equal(weights(net), net.before_step)


@pytest.mark.parametrize("trace", [False, True])
def test_error_ends_a_run_that_calls_backward_itself(ranks: RankPool, trace: bool) -> None:
    answers = ranks.run(fit_with_own_backward, trace, world=2)
    assert answers == [("ValueError('boom')", OwnBackward.fails_at, True)] * 2
