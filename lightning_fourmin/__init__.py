"""Fast, honest, large-batch data-parallel training for PyTorch Lightning: importing it registers `fourmin`."""

from importlib.metadata import version as _version

from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry

from lightning_fourmin.callbacks.finite_check import FiniteCheck
from lightning_fourmin.callbacks.preemption import PreemptionCheckpoint
from lightning_fourmin.callbacks.scaling_monitor import ScalingMonitor
from lightning_fourmin.callbacks.trust_ratios import TrustRatioMonitor
from lightning_fourmin.data.datamodule import ShardDataModule
from lightning_fourmin.models.classifier import ImageClassifier
from lightning_fourmin.optim.lars import LARS
from lightning_fourmin.optim.param_groups import param_groups
from lightning_fourmin.precision.plugin import FourMinPrecision
from lightning_fourmin.strategy import FourMinStrategy

__version__ = _version("lightning-fourmin")
__all__ = [
    "LARS",
    "FiniteCheck",
    "FourMinPrecision",
    "FourMinStrategy",
    "ImageClassifier",
    "PreemptionCheckpoint",
    "ScalingMonitor",
    "ShardDataModule",
    "TrustRatioMonitor",
    "param_groups",
]

if "fourmin" not in _StrategyRegistry:
    FourMinStrategy.register_strategies(_StrategyRegistry)
