"""Trust ratios of all layers at once: a row a layer, a column a stretch of steps, colour for the ratio."""

import base64
import io
import re
from dataclasses import dataclass

import numpy as np

from lightning_fourmin.runs.metrics import Metrics, Series
from lightning_fourmin.text import decimals

PREFIX = "trust_ratio/"
NUM_COLUMNS = 120


@dataclass(frozen=True)
class Row:
    name: str
    first: float
    last: float


@dataclass(frozen=True)
class HeatMap:
    rows: tuple[Row, ...]
    picture: str
    """A `data:` URL, one pixel a row and column."""
    colors: tuple[str, ...]
    """From the least to the largest ratio, for the key."""
    least: float
    largest: float
    first_step: int
    last_step: int

    @property
    def num_decimals(self) -> int:
        """Enough for the least, the same for all: points stand below each other."""
        return min(max(decimals(self.least, 1), 2), 9)

    @property
    def extremes(self) -> tuple[Row, Row]:
        """The layers that ended with the least and the largest ratio."""
        return min(self.rows, key=lambda row: row.last), max(self.rows, key=lambda row: row.last)


def trust_ratio_map(metrics: Metrics) -> HeatMap | None:
    """None if no ratios were logged."""
    names = sorted((name for name in metrics if name.startswith(PREFIX)), key=_natural)
    columns = {name: one for name in names if len((one := metrics[name]).steps) and one.values.max() > 0}
    if not columns:
        return None
    import matplotlib

    steps = np.unique(np.concatenate([one.steps for one in columns.values()]))
    edges = np.array([part[0] for part in np.array_split(steps, min(NUM_COLUMNS, len(steps)))])
    # Ratios act by their factor, so a step of colour is a factor, too.
    heat = np.stack([_log_means(one, edges) for one in columns.values()])
    low, high = float(np.nanmin(heat)), float(np.nanmax(heat))
    colors = matplotlib.colormaps["viridis"]
    shades = colors((heat - low) / ((high - low) or 1.0), bytes=True)
    shades[np.isnan(heat)] = 0
    return HeatMap(
        rows=tuple(Row(name.removeprefix(PREFIX), float(one.values[0]), one.last) for name, one in columns.items()),
        picture=_data_url(shades),
        colors=tuple(matplotlib.colors.to_hex(colors(share)) for share in np.linspace(0, 1, 9)),
        least=float(np.exp(low)),
        largest=float(np.exp(high)),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
    )


def _log_means(series: Series, edges: np.ndarray) -> np.ndarray:
    """The mean logarithm of the positive values from each edge to the next; NaN where there are none."""
    positive = series.values > 0
    places = np.searchsorted(edges, series.steps[positive], side="right") - 1
    sums = np.bincount(places, np.log(series.values[positive]), len(edges))
    counts = np.bincount(places, minlength=len(edges))
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(edges), np.nan), where=counts > 0)
    return means


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer2 before layer10: the logger has lost the order of the layers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _data_url(shades: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
