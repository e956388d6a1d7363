"""`DataMonitor`: logs how long training waits for its data, and how many damaged samples were skipped."""

from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


@runtime_checkable
class MonitoredLoader(Protocol):
    """What the monitor reads from a train loader. The loaders of `ShardDataModule` have it; others may have it as well.

    It is a protocol, because the class of those loaders needs packages that callbacks have to work without.
    """

    wait_s: float
    """The seconds that the training loop has waited for batches of this loader so far."""
    num_skipped: int
    """The number of damaged samples that this rank has skipped so far."""
    may_skip: bool
    """Whether damaged samples are skipped at all. It must be the same on all ranks."""


class DataMonitor(Callback):
    """Logs `data_wait_ms` and `data_skipped` to all loggers, after every `log_every_n_steps` batches of training.

    `data_wait_ms` is the mean time that rank 0 waited for a batch since it was last logged. `data_skipped` is the
    number of damaged samples that all ranks have skipped so far; if samples may be skipped, the ranks add the number up
    in a collective of the main thread. Nothing is logged for loaders that do not count these two, such as torch's own.
    """

    def __init__(self) -> None:
        self._logged_wait_s = 0.0
        """The part of the loader's `wait_s` that was logged already."""
        self._num_batches = 0
        """The number of batches since values were last logged."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer.train_dataloader)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if isinstance(loader, MonitoredLoader) and loader.wait_s < self._logged_wait_s:
            # This is another loader, which `reload_dataloaders_every_n_epochs` has made.
            self._begin(loader)

    def _begin(self, loader: Any) -> None:
        self._logged_wait_s = loader.wait_s if isinstance(loader, MonitoredLoader) else 0.0
        self._num_batches = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, MonitoredLoader):
            return
        self._num_batches += 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not 0 < every <= self._num_batches:
            return
        wait_ms = 1e3 * (loader.wait_s - self._logged_wait_s) / self._num_batches
        self._begin(loader)
        num_skipped = float(loader.num_skipped)
        if loader.may_skip:
            of_this_rank = torch.tensor(num_skipped, device=trainer.strategy.root_device)
            num_skipped = float(trainer.strategy.reduce(of_this_rank, reduce_op="sum"))
        for logger in trainer.loggers:
            logger.log_metrics({"data_wait_ms": wait_ms, "data_skipped": num_skipped}, step=trainer.global_step)
