"""Engines and fits that are torn down in the middle: nothing hangs, no thread, socket or shared memory stays."""

from itertools import product

import pytest

from lightning_fourmin.comm.algorithms import ALGORITHMS
from pool import RankPool
from teardown import STAGES_OF, WAYS, Teardown, tear_down_each


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", WAYS)
def test_torn_down_in_every_stage(ranks: RankPool, algorithm: str, way: str) -> None:
    teardowns = [Teardown(algorithm, stage, way) for stage in STAGES_OF[algorithm]]
    assert ranks.run(tear_down_each, teardowns, nodes=(2, 2), timeout=120) == [[]] * 4


@pytest.mark.parametrize("way", WAYS)
def test_torn_down_without_shared_memory_or_after_the_work_of_a_stage(ranks: RankPool, way: str) -> None:
    teardowns = [Teardown("hierarchical", *rest, after=True) for rest in product(STAGES_OF["hierarchical"], (way,))]
    assert ranks.run(tear_down_each, teardowns, shared_bytes=0, nodes=(2, 1), timeout=120) == [[]] * 3
