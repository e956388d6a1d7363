"""What the pictures of the documentation share: colours, configs and measured results."""

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.svg import SERIES

BLUE, ORANGE, GREEN, PURPLE, YELLOW = SERIES[:5]


def config(name: str, *overrides: str) -> Any:
    """The config of a verb as Hydra composes it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(overrides))


def results(name: str) -> Any:
    """What a benchmark measured."""
    return json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / f"{name}.json").read_text())["data"]
