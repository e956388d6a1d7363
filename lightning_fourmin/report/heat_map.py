"""The map of trust ratios: a row for each layer, a column for a range of steps, and a colour for the ratio.

logged ratios of a layer   0.011 0.012 ..   0.020 0.021 ..      `metrics`
mean logarithm by column   [   -4.47   ]    [   -3.89   ]       `_log_means`
pixel                      [  viridis  ]    [  viridis  ]       a PNG in the page, stretched by CSS
"""

import base64
import io
import re
from dataclasses import dataclass

import numpy as np

from lightning_fourmin.runs.metrics import Metrics, Series
from lightning_fourmin.text import decimals

PREFIX = "trust_ratio/"
MOST_COLUMNS = 120


@dataclass(frozen=True)
class Row:
    """A layer and the texts beside its row of pixels."""

    name: str
    first: float
    """The ratio that was logged first."""
    last: float
    """The ratio that was logged last."""


@dataclass(frozen=True)
class HeatMap:
    """The picture of the ratios and the texts around it."""

    rows: tuple[Row, ...]
    picture: str
    """A `data:` URL of a PNG with one pixel for each row and column."""
    colors: tuple[str, ...]
    """The colours from the least to the largest ratio, for the key."""
    least: float
    """The ratio of the first colour."""
    largest: float
    """The ratio of the last colour."""
    first_step: int
    last_step: int
    num_bad: int
    """How many ratios were not finite."""

    @property
    def num_decimals(self) -> int:
        """The number of decimals of all ratios: as many as the least ratio needs, so that columns of them align."""
        return min(max(decimals(self.least, 1), 2), 9)

    @property
    def extremes(self) -> tuple[Row, Row]:
        """The layers that ended with the least and the largest ratio."""
        return min(self.rows, key=lambda row: row.last), max(self.rows, key=lambda row: row.last)


def trust_ratio_map(metrics: Metrics) -> HeatMap | None:
    """The map of what TrustRatioMonitor logged; None if it logged nothing."""
    names = sorted((name for name in metrics if name.startswith(PREFIX)), key=_natural)
    columns = {name: one for name in names if len((one := metrics[name]).steps) and one.values.max() > 0}
    if not columns:
        return None
    import matplotlib

    steps = np.unique(np.concatenate([one.steps for one in columns.values()]))
    edges = np.array([part[0] for part in np.array_split(steps, min(MOST_COLUMNS, len(steps)))])
    # A ratio is a factor on the learning rate: by logarithms equal distances in colour are equal factors.
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
        num_bad=sum(metrics[name].num_bad for name in names),
    )


def _log_means(series: Series, edges: np.ndarray) -> np.ndarray:
    """The mean logarithm of the positive values from each edge to the next; NaN where there is none."""
    positive = series.values > 0
    places = np.searchsorted(edges, series.steps[positive], side="right") - 1
    sums = np.bincount(places, np.log(series.values[positive]), len(edges))
    counts = np.bincount(places, minlength=len(edges))
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(edges), np.nan), where=counts > 0)
    return means


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer2 before layer10, because the logger sorts names and loses the order of the layers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _data_url(shades: np.ndarray) -> str:
    """Colours as the URL of a PNG that the page itself contains."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
