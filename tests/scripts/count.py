"""A training script that may be killed: `count.py shards checkpoint [strategy]` prints its steps, saves, resumes."""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.counting import Counting, numbers_module
from tests.support.ranks import set_warning_filters

set_warning_filters()


class Save(Callback):
    """Prints what a step saw, then saves."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        assert isinstance(module, Counting)
        epoch, numbers = module.seen[-1]
        print("step", trainer.global_step, epoch, *numbers, flush=True)
        trainer.save_checkpoint(self._path)


def main(shards: str, checkpoint: str, strategy: str = "auto") -> None:
    path = Path(checkpoint)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1,
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Save(path)],
    )
    trainer.fit(Counting(), numbers_module(shards, 2, num_workers=2), ckpt_path=path if path.exists() else None)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
