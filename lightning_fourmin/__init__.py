"""Fast, honest, large-batch data-parallel training for PyTorch Lightning: importing it registers `fourmin`."""

from importlib.metadata import version

from lightning.pytorch.strategies import StrategyRegistry

from lightning_fourmin.data.datamodule import ShardDataModule
from lightning_fourmin.strategy import FourMinStrategy

__version__ = version("lightning-fourmin")
__all__ = ["FourMinStrategy", "ShardDataModule"]

if "fourmin" not in StrategyRegistry:
    FourMinStrategy.register_strategies(StrategyRegistry)
