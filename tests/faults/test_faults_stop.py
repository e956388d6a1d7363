"""A rank that is stopped (SIGSTOP): a report says who is missing; resumed in time nothing is lost, else all end."""

import logging
import os
import re
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_fourmin import FourMinStrategy
from tests.support.parity import Net, digest, images, state
from tests.support.pool import RankFailure, RankPool
from tests.support.ranks import current_case
from tests.support.training import rank_trainer

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
    logging.getLogger("lightning_fourmin.faults.missing_ranks").addHandler(handler)
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


def test_not_resumed_all_end_and_name_it(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        ranks.run(fit, "KILL", 8.0, 2.0, tmp_path, nodes=(2, 1))
    for rank in (0, 2):
        error, *lines = (tmp_path / f"rank{rank}.txt").read_text().splitlines()
        assert re.match(r"\w+: rank 1 is gone: killed, stopped, or on a machine that does not answer; resume", error)
        assert any("not arrived: rank 1 " in line for line in lines)
