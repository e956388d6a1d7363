"""Engines and fits that are torn down in the middle: nothing hangs, no thread, socket or shared memory stays.

Every way with every algorithm: soak/soak_races.py.
"""

import pytest

from tests.support.pool import RankPool
from tests.support.teardown import STAGES_OF, WAYS, Teardown, tear_down_each


@pytest.mark.parametrize(
    ("algorithm", "way"), [("ring", "leave"), ("torus", "fail"), *(("hierarchical", way) for way in WAYS)]
)
def test_torn_down_in_every_stage(ranks: RankPool, algorithm: str, way: str) -> None:
    teardowns = [Teardown(algorithm, stage, way) for stage in STAGES_OF[algorithm]]
    assert ranks.run(tear_down_each, teardowns, nodes=(2, 2), timeout=120) == [[]] * 4


def test_torn_down_without_shared_memory_after_the_work_of_a_stage(ranks: RankPool) -> None:
    teardowns = [Teardown("hierarchical", stage, "close", after=True) for stage in STAGES_OF["hierarchical"]]
    assert ranks.run(tear_down_each, teardowns, shared_bytes=0, nodes=(2, 1), timeout=120) == [[]] * 3
