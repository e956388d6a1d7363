"""The versions of torch and Lightning that the package is tested with."""

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from packaging.version import Version

TESTED = {"lightning": ("2.6", "2.7", lightning.__version__), "torch": ("2.13", "2.14", torch.__version__)}
"""First version, first version beyond, version found."""


def warn_outside_tested_versions() -> None:
    for package, (first, beyond, found) in TESTED.items():
        if not Version(first) <= Version(found) < Version(beyond):
            rank_zero_warn(f"lightning-fourmin is tested with {package} >={first},<{beyond}; this is {found}")
