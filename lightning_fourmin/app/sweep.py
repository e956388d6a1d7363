"""What a sweep leaves behind: a table and a picture of all its jobs."""

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepReport(Callback):
    """Called by Hydra (`hydra.callbacks`) when the last job of a multirun has ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        pass
