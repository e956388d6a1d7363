"""Tears an engine or a whole fit down while a bucket is held in a stage; says what goes wrong and what is left."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.algorithms import STAGES
from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.faults.missing_ranks import MissingRanks
from tests.allreduce.test_engine import engine
from tests.allreduce.test_engine_errors import wait_for_threads
from tests.support.parity import Net, images
from tests.support.ranks import ADDRESS, current_case
from tests.support.training import rank_trainer

HOLD_S = 0.2
TIMEOUT_S = 2.0
FIT_TIMEOUT_S = 6.0
"""The timeout of the engine's groups in a fit; the steps before the fault must not need as long."""
FUTURE_S = 10.0
NUM_BUCKETS = 3
BAD_STEP = 2
"""Not the first one: DDP cuts its buckets anew after it."""
WAYS = ("close", "leave", "fail", "destroy", "raise")
STAGES_OF = {"ring": ("scatter", "finish"), "hierarchical": (*STAGES, "finish"), "torus": (*STAGES, "finish")}


@dataclass(frozen=True)
class Teardown:
    """close: in good order. leave: without waiting for the stages. fail: another rank is lost. destroy: the process
    groups go first. raise: user code fails in the backward pass of rank 0."""

    algorithm: str
    stage: str
    way: str
    after: bool = False
    """Whether the bucket is held after the stage has done its work, and not before."""

    def concerns(self, engine: Engine) -> bool:
        """Whether the engine of this rank has the stage."""
        return self.stage in (*engine.stages, "finish")


class Hold:
    """Holds the first bucket that comes to the stage once it is armed."""

    def __init__(self) -> None:
        self.armed, self.there = threading.Event(), threading.Event()


@contextmanager
def held(teardown: Teardown) -> Iterator[Hold]:
    hold, advance = Hold(), Engine.advance

    def advance_or_wait(self: Engine, piece: Any, stage: str, *args: Any, **kwargs: Any) -> None:
        first = piece.bucket.index == 0 and hold.armed.is_set() and not hold.there.is_set()
        here = first and stage == teardown.stage
        if not here or teardown.after:
            advance(self, piece, stage, *args, **kwargs)
        if here:
            hold.there.set()
            time.sleep(HOLD_S)
            if not teardown.after:
                advance(self, piece, stage, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "advance", advance_or_wait)
        if teardown.way == "leave":
            patch.setattr("lightning_fourmin.allreduce.engine.JOIN_S", 0.0)
        yield hold


@contextmanager
def group_of(store: dist.Store) -> Iterator[None]:
    """A default group by this store in the place of the one that there is, which is gone in the end."""
    case, timeout = current_case(), timedelta(seconds=30)
    if dist.is_initialized():
        _leave_together()
    dist.init_process_group("gloo", store=store, rank=case.rank, world_size=case.world, timeout=timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            _leave_together()


def own_world(number: int) -> AbstractContextManager[None]:
    """A default group of its own in the store of the case."""
    case = current_case()
    store = dist.TCPStore(ADDRESS, case.store_port, is_master=False, timeout=timedelta(seconds=30))
    return group_of(dist.PrefixStore(f"case{case.number}/world{number}", store))


def _leave_together() -> None:
    # A rank that leaves while another one still connects would make that one fail.
    dist.barrier()
    dist.destroy_process_group()


def tear_engine_down(teardown: Teardown, shared_bytes: int) -> list[str]:
    """Tears an engine down; gives what went wrong."""
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "shared_bytes": shared_bytes}
    with (
        held(teardown) as hold,
        closing(MissingRanks(0.4)) as missing_ranks,
        engine(teardown.algorithm, missing_ranks=missing_ranks, **options) as made,
    ):
        hold.armed.set()
        futures = [made.submit(torch.ones(1000), index) for index in range(NUM_BUCKETS)]
        if teardown.concerns(made):
            assert hold.there.wait(FUTURE_S), "the bucket has not come to the stage"
        dist.barrier()  # a rank that fails sooner could keep the bucket of another one from its stage
        if teardown.way == "fail":
            made.fail(LostRankError("rank 9 is gone"))
        elif teardown.way == "destroy":
            dist.destroy_process_group()
        made.close()
        missing_ranks.close()
        deadline = time.monotonic() + FUTURE_S
        while not all(future.done() for future in futures) and time.monotonic() < deadline:
            time.sleep(0.01)
        wrong = [f"bucket {index} is not done" for index, future in enumerate(futures) if not future.done()]
        if teardown.way == "close" and not wrong:
            made.raise_error()
            wrong += [f"bucket {index} is wrong" for index, f in enumerate(futures) if not (f.wait() == 1).all()]
        return wrong + wait_for_threads()


class Faulty(Net):
    """Rank 0 fails in a backward pass, once its first bucket is in the stage."""

    def __init__(self, teardown: Teardown, hold: Hold) -> None:
        super().__init__()
        self._teardown, self._hold = teardown, hold

    def on_fit_start(self) -> None:
        self.features[0].weight.register_hook(self._fail)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == BAD_STEP:
            self._hold.armed.set()
        return super().training_step(batch, batch_idx)

    def _fail(self, gradient: Tensor) -> None:
        if self.global_rank == 0 and self._hold.armed.is_set():
            strategy = self.trainer.strategy
            assert isinstance(strategy, FourMinStrategy)
            assert strategy._engine is not None
            if self._teardown.concerns(strategy._engine):
                assert self._hold.there.wait(FUTURE_S), "the bucket has not come to the stage"
            raise ValueError("a bug of the user")


def tear_fit_down(teardown: Teardown) -> list[str]:
    strategy = FourMinStrategy(
        algorithm=teardown.algorithm, fusion_mb=0.1, timeout=timedelta(seconds=FIT_TIMEOUT_S), stall_warning_s=30
    )
    text = "no error"
    with held(teardown) as hold:
        try:
            rank_trainer(strategy, max_epochs=1).fit(Faulty(teardown, hold), images(4))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    failed = "ValueError: a bug of the user"
    right = text == failed if current_case().rank == 0 else f"rank 0 failed: {failed}" in text
    return [*([] if right else [f"ended with {text}"]), *wait_for_threads()]


def held_things() -> Counter[str]:
    """Open sockets, pipes and shared memory of this process."""
    gc.collect()
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    found["mapped"] = Path("/proc/self/maps").read_text().count("memfd:fourmin")
    return Counter({kind: found[kind] for kind in ("socket", "pipe", "anon_inode", "/memfd", "mapped")})


def tear_down_each(teardowns: list[Teardown], shared_bytes: int = 1 << 20) -> list[str]:
    """Does one after the other, each in a world of its own; gives what went wrong in any, and what is left of it."""
    with own_world(0):
        tear_engine_down(Teardown(teardowns[0].algorithm, "finish", "close"), shared_bytes)
    before, complaints = held_things(), []
    for number, teardown in enumerate(teardowns, start=1):
        with own_world(number):
            wrong = tear_fit_down(teardown) if teardown.way == "raise" else tear_engine_down(teardown, shared_bytes)
        wrong += [f"{number} x {kind} left" for kind, number in (held_things() - before).items()]
        complaints += [f"{teardown}: {text}" for text in wrong]
    return complaints
