"""Ranks killed at random steps and in random phases, and runs interrupted at random times."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from pool import RankPool
from test_faults_ranks import check_survivors
from test_launchers import SCRIPT, running

LAYOUTS = {2: ((2,), (1, 1)), 4: ((4,), (2, 2), (3, 1))}


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("seed", range(20))
def test_survivors_name_the_rank_that_was_killed(ranks: RankPool, tmp_path: Path, world: int, seed: int) -> None:
    check_survivors(ranks, tmp_path, LAYOUTS[world][seed % len(LAYOUTS[world])], seed)


@pytest.mark.parametrize("seed", range(20))
def test_ctrl_c_at_any_time_leaves_no_process(tmp_path: Path, seed: int) -> None:
    with running([SCRIPT, "fourmin", "2", "1000000"], tmp_path) as run:
        time.sleep(random.Random(seed).uniform(0.2, 12.0))
        os.killpg(run.process.pid, signal.SIGINT)
        run.process.wait(30)
        assert run.left() == []
