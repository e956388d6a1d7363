"""A rank that is stopped (SIGSTOP): a report says who is missing; resumed in time nothing is lost, else all end."""

import logging
import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_fourmin import FourMinStrategy
from parity import Net, digest, images, state
from pool import RankFailure, RankPool
from ranks import current_case
from test_launchers import TESTS, running
from training import rank_trainer

STOPPED_STEP = 2


class Stopping(Net):
    """Rank 1 stops itself in one step; a process of its own sends it another signal later."""

    def __init__(self, signal_name: str | None, after_s: float) -> None:
        super().__init__()
        self._signal_name, self._after_s = signal_name, after_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self._signal_name is not None and (self.global_rank, batch_idx) == (1, STOPPED_STEP):
            later = f"sleep {self._after_s}; kill -{self._signal_name} {os.getpid()}"
            helper = subprocess.Popen(["sh", "-c", later])
            os.kill(os.getpid(), signal.SIGSTOP)
            helper.wait()
        return super().training_step(batch, batch_idx)


def fit(signal_name: str | None, after_s: float, timeout_s: float, folder: Path) -> tuple[str, list[str]]:
    """Digest of the state, and what was said about stalls; leaves an error in `folder` and ends the process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_fourmin.comm.stall").addHandler(handler)
    torch.manual_seed(1)
    net = Stopping(signal_name, after_s)
    strategy = FourMinStrategy(fusion_mb=0.1, stall_warning_s=0.4, timeout=timedelta(seconds=timeout_s))
    try:
        rank_trainer(strategy, max_epochs=1).fit(net, images(4))
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n" + "\n".join(lines)
        (folder / f"rank{current_case().rank}.txt").write_text(text)
        os._exit(1)
    return digest(state(net)), lines


def test_resumed_in_time_the_run_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    undisturbed = ranks.run(fit, None, 0.0, 60.0, tmp_path, nodes=(2, 1))
    stopped = ranks.run(fit, "CONT", 1.5, 60.0, tmp_path, nodes=(2, 1))
    assert [found for found, _ in stopped] == [found for found, _ in undisturbed]
    for rank in (0, 2):
        assert any(
            re.search(r"has waited for more than 0.4 s; not arrived: rank 1 ", line) for line in stopped[rank][1]
        )


def test_rank_0_is_stopped_which_holds_the_store(tmp_path: Path) -> None:
    fault = "0:5:SIGSTOP:0"
    script = [str(TESTS / "scripts" / "survive.py"), "3", str(tmp_path), fault, "timeout_s=4", "stall_warning_s=1"]
    with running(script, tmp_path) as run:
        deadline = time.monotonic() + 180
        # Rank 0 is the script itself, and was started without a rank.
        while not (tmp_path / f"{fault}.done").exists() or run.processes("LOCAL_RANK="):
            assert run.process.poll() is None, run.output
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
        said = "it waits for rank 0; the store, which knows about the others, does not answer"
        assert f"has waited for more than 1 s; {said}" in run.output
        assert run.output.count("LostRankError: rank 0 is gone: the store of the process group") == 2, run.output
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.process.wait(60) != 0
        assert run.left() == []


def test_not_resumed_all_end_and_name_it(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        ranks.run(fit, "KILL", 8.0, 2.0, tmp_path, nodes=(2, 1))
    for rank in (0, 2):
        error, *lines = (tmp_path / f"rank{rank}.txt").read_text().splitlines()
        assert re.match(r"\w+: rank 1 is gone: killed, stopped, or on a machine that does not answer; resume", error)
        assert any("not arrived: rank 1 " in line for line in lines)
