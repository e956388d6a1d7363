"""The engine under random delays of every stage on every rank: right means, no deadlock, whatever the timing."""

import pytest

from pool import RankPool
from test_engine import MEMORIES, check, reduce_many

LAYOUTS = ((2, 2), (4,), (3, 1), (2, 1), (1, 1, 1, 1))


@pytest.mark.parametrize("seed", range(200))
def test_random_delays(ranks: RankPool, seed: int) -> None:
    nodes, memory = LAYOUTS[seed % len(LAYOUTS)], MEMORIES[seed % len(MEMORIES)]
    answers = ranks.run(reduce_many, None, memory, largest_sleep_s=0.005, num_rounds=2, seed=seed, nodes=nodes)
    check(answers, f"seed {seed}", largest_error=6)
