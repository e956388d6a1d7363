"""The engine under random delays, and torn down, in every stage on every rank: nobody waits for ever."""

from itertools import product

import pytest

from tests.allreduce.test_engine import MEMORIES, check, reduce_many
from tests.support.figures import figure
from tests.support.pool import RankPool
from tests.support.teardown import STAGES_OF, WAYS, Teardown, tear_down_each

LAYOUTS = ((2, 2), (4,), (3, 1), (2, 1), (1, 1, 1, 1))


@pytest.mark.parametrize("seed", range(200))
def test_random_delays(ranks: RankPool, seed: int) -> None:
    nodes, memory = LAYOUTS[seed % len(LAYOUTS)], MEMORIES[seed % len(MEMORIES)]
    answers = ranks.run(reduce_many, None, memory, largest_sleep_s=0.005, num_rounds=2, seed=seed, nodes=nodes)
    check(answers, f"seed {seed}", largest_error=6)
    figure("All-reduces with random delays in all stages", 1, "cases")


@pytest.mark.parametrize("shared_bytes", [0, 1 << 20])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nodes", LAYOUTS)
def test_torn_down_in_every_stage(ranks: RankPool, nodes: tuple[int, ...], after: bool, shared_bytes: int) -> None:
    algorithms = STAGES_OF if len(set(nodes)) == 1 else ("ring", "hierarchical")
    for algorithm, way in product(algorithms, WAYS):
        teardowns = [Teardown(algorithm, stage, way, after) for stage in STAGES_OF[algorithm]]
        assert ranks.run(tear_down_each, teardowns, shared_bytes, nodes=nodes, timeout=240) == [[]] * sum(nodes)
        figure("Engines torn down in a stage", len(teardowns), "cases")
