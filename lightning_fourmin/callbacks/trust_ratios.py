"""Logging of the trust ratios of LARS, one curve for each parameter."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_fourmin.callbacks.logged_steps import is_logged_step
from lightning_fourmin.optim.lars import LARS


class TrustRatioMonitor(Callback):
    """Logs `trust_ratio/<parameter>` to all loggers, every `log_every_n_steps` steps.

    With several LARS optimizers the name is `trust_ratio/<index of the optimizer>/<parameter>`.
    """

    def __init__(self) -> None:
        self._logged_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = trainer.global_step
        if not _lars_optimizers(trainer):
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise ValueError(
                f"TrustRatioMonitor needs a LARS optimizer, but configure_optimizers gave {found}: return "
                "lightning_fourmin.LARS there, or drop the callback"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Reading the ratios waits for the device, so they are read only if they are logged, and once a step. The last
        # step of a run that stops is logged, too. Ranks may see `should_stop` at different times, which is harmless
        # here, since there is no collective.
        is_logged = is_logged_step(trainer, pl_module) or trainer.should_stop
        if trainer.global_step == self._logged_step or not is_logged:
            return
        self._logged_step = trainer.global_step
        optimizers = _lars_optimizers(trainer)
        for index, optimizer in optimizers.items():
            prefix = "trust_ratio" if len(optimizers) == 1 else f"trust_ratio/{index}"
            ratios = {f"{prefix}/{name}": ratio for name, ratio in optimizer.trust_ratios().items()}
            pl_module.log_dict(ratios, batch_size=1)


def _lars_optimizers(trainer: Trainer) -> dict[int, LARS]:
    return {i: optimizer for i, optimizer in enumerate(trainer.optimizers) if isinstance(optimizer, LARS)}
