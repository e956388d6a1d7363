"""A fit in which one rank is killed: which one, when and in what phase is drawn from a seed."""

import os
import random
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.allreduce.algorithms import ALGORITHMS
from tests.support.parity import Net, images
from tests.support.ranks import current_case
from tests.support.training import rank_trainer

NUM_STEPS = 1000
"""More than are done before the kill."""
KILLED = "killed"
"""A file whose time is that of the kill."""


@dataclass(frozen=True)
class Death:
    """Who dies, in which step, how long after it has begun, and the all-reduce that is in flight."""

    rank: int
    step: int
    delay_s: float
    algorithm: str

    @classmethod
    def draw(cls, seed: int, world: int) -> "Death":
        rng = random.Random(seed)
        return cls(rng.randrange(world), rng.randrange(8), rng.uniform(0, 0.05), rng.choice(("hybrid", *ALGORITHMS)))


class Mortal(Net):
    def __init__(self, death: Death, folder: Path) -> None:
        super().__init__()
        self._death, self._folder = death, folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self._death.rank and batch_idx == self._death.step:
            threading.Timer(self._death.delay_s, self._die).start()
        return super().training_step(batch, batch_idx)

    def _die(self) -> None:
        (self._folder / KILLED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fit_until_a_rank_dies(seed: int, folder: Path) -> None:
    """Leaves the error of each survivor in `folder` and ends its process, as the error of a script would."""
    death = Death.draw(seed, current_case().world)
    torch.manual_seed(1)
    strategy = FourMinStrategy(algorithm=death.algorithm, fusion_mb=0.1)
    try:
        rank_trainer(strategy, max_epochs=1).fit(Mortal(death, folder), images(NUM_STEPS))
    except Exception as error:
        (folder / f"rank{current_case().rank}.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
