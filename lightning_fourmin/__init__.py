"""Fast, honest, large-batch data-parallel training for PyTorch Lightning: importing it registers `fourmin`.

`__all__` is the contract: these names stay. Those of the plug-in are imported here, those that need the extra [data]
when they are first used.
"""

import typing as _typing
from importlib import import_module as _import_module
from importlib.metadata import version as _version

from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry

from lightning_fourmin.callbacks.data_monitor import DataMonitor
from lightning_fourmin.callbacks.finite_check import FiniteCheck
from lightning_fourmin.callbacks.preemption import PreemptionCheckpoint
from lightning_fourmin.callbacks.scaling_monitor import ScalingMonitor
from lightning_fourmin.callbacks.trust_ratios import TrustRatioMonitor
from lightning_fourmin.errors import FourMinError
from lightning_fourmin.optim.lars import LARS
from lightning_fourmin.optim.param_groups import param_groups
from lightning_fourmin.optim.schedule import CosineSchedule, PolySchedule, StepSchedule
from lightning_fourmin.precision.plugin import FourMinPrecision
from lightning_fourmin.strategy import FourMinStrategy

if _typing.TYPE_CHECKING:
    from lightning_fourmin.data.datamodule import ShardDataModule
    from lightning_fourmin.data.sample import Sample
    from lightning_fourmin.data.transforms import EvalImage, TrainImage
    from lightning_fourmin.models.classifier import ImageClassifier

__version__ = _version("lightning-fourmin")
__all__ = [
    "LARS",
    "CosineSchedule",
    "DataMonitor",
    "EvalImage",
    "FiniteCheck",
    "FourMinError",
    "FourMinPrecision",
    "FourMinStrategy",
    "ImageClassifier",
    "PolySchedule",
    "PreemptionCheckpoint",
    "Sample",
    "ScalingMonitor",
    "ShardDataModule",
    "StepSchedule",
    "TrainImage",
    "TrustRatioMonitor",
    "param_groups",
]
_NAMES_OF_DATA = {
    "EvalImage": "lightning_fourmin.data.transforms",
    "ImageClassifier": "lightning_fourmin.models.classifier",
    "Sample": "lightning_fourmin.data.sample",
    "ShardDataModule": "lightning_fourmin.data.datamodule",
    "TrainImage": "lightning_fourmin.data.transforms",
}
"""The module of each name that needs the extra [data]."""

if "fourmin" not in _StrategyRegistry:
    FourMinStrategy.register_strategies(_StrategyRegistry)


if not _typing.TYPE_CHECKING:  # type checkers would take every name for known

    def __getattr__(name: str) -> object:
        """Imports a name of `_NAMES_OF_DATA`: Python asks here for what it does not find among the names above."""
        if name not in _NAMES_OF_DATA:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = _import_module(_NAMES_OF_DATA[name])
        except ModuleNotFoundError as error:
            raise ImportError(f"{name} needs the extra [data]: pip install 'lightning-fourmin[data]'") from error
        # From now on Python finds the name by itself.
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    """The names of this module, with those that were not imported yet."""
    return sorted({*globals(), *__all__})
