"""A training script that is killed: `count.py shards run_dir` prints each batch's samples, saves each step, resumes."""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from counting import Counting, numbers_module
from ranks import set_warning_filters

set_warning_filters()


class Report(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        assert isinstance(module, Counting)
        epoch, numbers = module.seen[-1]
        print("step", trainer.global_step, epoch, *numbers, flush=True)


def main(path: str, directory: str) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(), ModelCheckpoint(directory, "last", every_n_train_steps=1, enable_version_counter=False)],
    )
    last = Path(directory) / "last.ckpt"
    data = numbers_module(path, 2, num_workers=2)
    trainer.fit(Counting(), data, ckpt_path=last if last.exists() else None)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
