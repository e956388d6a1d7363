"""Ranks killed at random steps and in random phases, and runs interrupted or asked to end at random times."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.cli.test_train import end_all
from tests.faults.test_faults_ranks import check_survivors
from tests.faults.test_launchers import SCRIPT, running
from tests.support.figures import figure
from tests.support.pool import RankPool

LAYOUTS = {2: ((2,), (1, 1)), 4: ((4,), (2, 2), (3, 1))}


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("seed", range(20))
def test_survivors_name_the_rank_that_was_killed(ranks: RankPool, tmp_path: Path, world: int, seed: int) -> None:
    seconds = check_survivors(ranks, tmp_path, LAYOUTS[world][seed % len(LAYOUTS[world])], seed)
    figure(f"A rank of {world} is killed: until all others know and end", seconds, "s")


@pytest.mark.parametrize("seed", range(20))
def test_ctrl_c_at_any_time_leaves_no_process(tmp_path: Path, seed: int) -> None:
    with running([SCRIPT, "fourmin", "2", "1000000"], tmp_path) as run:
        time.sleep(random.Random(seed).uniform(0.2, 12.0))
        start_s = time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)
        run.process.wait(30)
        assert run.left() == []
        figure("Ctrl-C at any time: until no process is left", time.monotonic() - start_s, "s")


@pytest.mark.parametrize("seed", range(10))
def test_sigterm_at_any_time_saves(tmp_path: Path, seed: int) -> None:
    with running(["-m", "lightning_fourmin", "train"], tmp_path) as run:
        delay_s = random.Random(seed).uniform(0, 5)
        asked_s = end_all(run, tmp_path, "runs/digits/*/metrics.csv", signal.SIGTERM, delay_s)
        ended_s = time.time()
    (saved,) = tmp_path.glob("runs/digits/*/checkpoints/last.ckpt")
    seconds = saved.stat().st_mtime - asked_s
    assert seconds > 0
    figure("SIGTERM to `fourmin train`: until the checkpoint is saved", seconds, "s")
    figure("SIGTERM to `fourmin train`: until no process is left", ended_s - asked_s, "s")
