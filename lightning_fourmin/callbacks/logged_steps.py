"""When Lightning writes logged values: callbacks that ask compute nothing for the steps in between."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer


def is_logged_step(trainer: Trainer, module: LightningModule) -> bool:
    """Whether values that are logged in `on_train_batch_end` of this batch reach the loggers; alike on all ranks.

    Lightning counts batches that end with a step, however many optimizers have stepped in them. In automatic
    optimization, which has one optimizer, their number is `global_step`; while gradients accumulate, the answer is that
    for the last step. In manual optimization every batch counts. Lightning also writes if `trainer.should_stop` is set,
    but ranks may see that at different times, so it is left out here.
    """
    every_n: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if module.automatic_optimization:
        num_steps = trainer.global_step
    else:
        # Batches that `on_train_batch_start` skips count as "ready" in Lightning, but not as "started".
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        num_steps = batches.started
    return every_n > 0 and num_steps % every_n == 0
