"""Stands for the Hydra tree in a checkout, where `conf/` is beside the package, so that `pkg://` URLs find it.

The wheel has the tree at `lightning_fourmin/conf/` and not this file.
"""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).parents[1] / "conf"
_spec = importlib.util.spec_from_file_location(
    __name__, _folder / "__init__.py", submodule_search_locations=[str(_folder)]
)
assert _spec is not None
# What is imported is what stands here when this file has run.
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
