"""Dropout of `fourmin train` differs between ranks and steps, and is the same when a run resumes."""

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.callbacks.step_seed import StepSeed
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer


class Dropping(Regression):
    """Keeps which of 64 units it has dropped, and a checkpoint of the middle of the first epoch."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(nn.Linear(4, 4))
        self.checkpoint, self.dropped = checkpoint, list[str]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kept = nn.functional.dropout(torch.ones(64), 0.5)
        self.dropped.append("".join("x" if unit else "-" for unit in kept.tolist()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.checkpoint)


def dropped(checkpoint: Path, go_on: bool) -> list[str]:
    """In two epochs of four steps, or from the checkpoint on."""
    seed_everything(1, verbose=False)
    module = Dropping(checkpoint)
    trainer = rank_trainer(FourMinStrategy(), max_epochs=2, callbacks=[StepSeed(1)])
    with warnings.catch_warnings():
        # A plain loader begins its epoch again, with other samples for the steps that are left.
        warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
        trainer.fit(module, data(4), ckpt_path=checkpoint if go_on else None)
    return module.dropped


def test_ranks_and_steps_differ_and_a_run_goes_on_the_same(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(dropped, tmp_path / "two.ckpt", False, world=2)
    assert [len(one) for one in whole] == [8, 8]
    assert len({mask for one in whole for mask in one}) == 16
    assert ranks.run(dropped, tmp_path / "two.ckpt", True, world=2) == [one[2:] for one in whole]
