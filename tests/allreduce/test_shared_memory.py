"""Shared memory inside a node: stretches wrap around, are never reused too early, and ranks without it still work."""

import os
import random
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fourmin.allreduce.engine import Engine
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.shared_memory import SharedArena
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.topology import Topology
from tests.support.pool import RankPool
from tests.support.ranks import current_case


def make_engine(algorithm: str, shared_bytes: int, wire_dtype: torch.dtype | None = None) -> Engine:
    topology = Topology.build([0] * current_case().world)
    table = AllReduceTable.from_cost_model(topology, "gloo").only(algorithm)
    groups = ProcessGroups.shared(timedelta(seconds=60))
    return Engine(CommPlan(topology, table, wire_dtype), groups, torch.device("cpu"), shared_bytes=shared_bytes)


def wrap_around(algorithm: str, wire_dtype: torch.dtype | None) -> list[int]:
    """Buckets of changing size, a few at a time, many times more than the area holds; gives the wrong ones."""
    rank, world = current_case().rank, current_case().world
    sizes = random.Random(0)
    delays = random.Random(rank)
    wrong = []
    with closing(make_engine(algorithm, shared_bytes=40_000, wire_dtype=wire_dtype)) as engine:
        for turn in range(300):
            numels = [sizes.choice([1, 100, 2500, 3333]) for _ in range(3)]
            futures = [engine.submit(torch.full((n,), float(turn + rank)), i) for i, n in enumerate(numels)]
            time.sleep(delays.random() * 1e-3)
            expected = turn + (world - 1) / 2
            if not all(torch.equal(future.wait(), torch.full_like(future.wait(), expected)) for future in futures):
                wrong.append(turn)
        engine.raise_error()
    return wrong


@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
@pytest.mark.parametrize("algorithm", ["hierarchical", "torus"])
def test_an_area_is_used_again_and_again(ranks: RankPool, algorithm: str, wire_dtype: torch.dtype | None) -> None:
    assert ranks.run(wrap_around, algorithm, wire_dtype, world=4) == [[]] * 4


def many_under_way() -> bool:
    """Far more submitted at once than the area holds: submission waits for stretches; in FP16 results stay put."""
    with closing(make_engine("torus", shared_bytes=30_000, wire_dtype=torch.float16)) as engine:
        futures = [engine.submit(torch.full((9_000,), float(i)), i) for i in range(200)]
        return all(torch.equal(f.wait(), torch.full((9_000,), float(i))) for i, f in enumerate(futures))


def test_more_than_the_area_holds_under_way(ranks: RankPool) -> None:
    assert ranks.run(many_under_way, world=2) == [True] * 2


def open_without_memory_on_rank_1(monkeypatched: bool) -> tuple[bool, bool]:
    engine_has_arena = []
    original = os.memfd_create
    if monkeypatched and current_case().rank == 1:
        del os.memfd_create
    try:
        with closing(make_engine("hierarchical", shared_bytes=4_000)) as engine:
            engine_has_arena.append(engine._arena is not None)
            mean = engine.submit(torch.full((1000,), float(current_case().rank)), 0).wait()
    finally:
        os.memfd_create = original
    return engine_has_arena[0], bool((mean == 0.5).all())


def open_without_pipes_on_rank_1() -> tuple[bool, bool]:
    with pytest.MonkeyPatch.context() as patch:
        if current_case().rank == 1:
            patch.setattr("lightning_fourmin.allreduce.shared_memory.os.pipe", _no_pipe)
        with closing(make_engine("hierarchical", shared_bytes=4_000)) as engine:
            patch.undo()
            mean = engine.submit(torch.full((1000,), float(current_case().rank)), 0).wait()
            return engine._arena is not None, bool((mean == 0.5).all())


def _no_pipe() -> tuple[int, int]:
    raise OSError(24, "Too many open files")


def test_all_ranks_use_messages_if_one_has_no_pipes(ranks: RankPool) -> None:
    assert ranks.run(open_without_pipes_on_rank_1, world=2) == [(False, True)] * 2


def test_all_ranks_use_messages_if_one_cannot_map(ranks: RankPool) -> None:
    assert ranks.run(open_without_memory_on_rank_1, True, world=2) == [(False, True)] * 2
    assert ranks.run(open_without_memory_on_rank_1, False, world=2) == [(True, True)] * 2


def left_behind() -> Any:
    with closing(make_engine("hierarchical", shared_bytes=4_000)) as engine:
        assert isinstance(engine._arena, SharedArena)
        descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [target for target in descriptors if "memfd:fourmin" in target]


def test_no_descriptor_stays_open(ranks: RankPool) -> None:
    assert ranks.run(left_behind, world=2) == [[]] * 2
