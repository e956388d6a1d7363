"""What the pictures of the documentation share: size, axes, colors, configs, results."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from matplotlib.figure import Figure

from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.report.svg import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE, YELLOW = SERIES[:5]


def grid(height: float, num_columns: int = 1, **ratios: Any) -> tuple[Figure, list["Axes"]]:
    """A figure as wide as a page, `height` in inches, with axes side by side."""
    figure = Figure(figsize=(9.5, height), layout="constrained")
    return figure, list(figure.subplots(1, num_columns, squeeze=False, **ratios)[0])


def log_axes(axes: "Axes", x_base: int | None = None, y_base: int | None = None) -> None:
    """Logarithmic axes whose ticks are plain numbers: the text of our pictures has no formulas."""
    for base, axis in ((x_base, axes.xaxis), (y_base, axes.yaxis)):
        if base is not None:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log", base=base)
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()


def config(name: str, *overrides: str) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(overrides))


def results(name: str) -> Any:
    """What a benchmark measured."""
    return json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / f"{name}.json").read_text())["data"]
