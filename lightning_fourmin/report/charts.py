"""The small charts of a page: lines over the steps of a run, and milliseconds of the all-reduces by size.

A chart is an SVG with HTML around it. Title and key stand above the picture, where they never lie over a curve; values
that cannot be drawn are counted in a note below it. Axes are linear but for values that are powers of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_fourmin.allreduce.table import Row
from lightning_fourmin.runs.metrics import Series
from lightning_fourmin.runs.record import TableRecord
from lightning_fourmin.svg import MUTED, SERIES, VARIABLES, style, tick_label, to_svg
from lightning_fourmin.text import plural
from lightning_fourmin.tune.plot import algorithms_in, plot_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 372, 216
"""The size of a chart in CSS pixels: a column of the page on a desk, and the width of a phone, so that text on both has
the size that it was drawn with."""
LineStyle = Literal["line", "dashes", "dots"]


@dataclass(frozen=True)
class Line:
    """A curve: a logged value and how it is drawn."""

    label: str
    series: Series
    color: str
    style: LineStyle = "line"
    in_key: bool = True


@dataclass(frozen=True)
class Key:
    """An entry of the key above a chart."""

    label: str
    color: str
    style: LineStyle = "line"

    @property
    def css_color(self) -> str:
        """The CSS variable of the colour."""
        return VARIABLES[self.color]


@dataclass(frozen=True)
class Chart:
    """A picture with the texts around it."""

    title: str
    svg: str
    keys: tuple[Key, ...] = ()
    notes: tuple[str, ...] = ()


def line_chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    *,
    percent: bool = False,
    from_zero: bool = False,
    powers_of_two: bool = False,
    marked_steps: Sequence[int] = (),
) -> Chart | None:
    """Values over the steps of a run; None if nothing was logged.

    `percent` shows shares of 1 as percentages, `powers_of_two` makes the vertical axis logarithmic with powers of two
    as its ticks, and each of `marked_steps` gets a dotted line.
    """
    lines = [line for line in lines if len(line.series.steps) or line.series.num_bad]
    if not lines:
        return None
    keys = [Key(line.label, line.color, line.style) for line in lines if line.in_key]
    with style():
        figure, axes = _small_figure()
        for line in lines:
            _plot(axes, line)
        for step in marked_steps:
            axes.axvline(step, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
        _set_ticks(axes, percent, powers_of_two)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        label = f"{title} over the steps of the run: {', '.join(key.label for key in keys)}"
        svg = to_svg(figure, name, label)
    notes = tuple(
        f"{plural(line.series.num_bad, 'value')} of {line.label}, the first at step {line.series.first_bad_step:,}, "
        "cannot be drawn: not a finite number."
        for line in lines
        if line.series.num_bad
    )
    return Chart(title, svg, tuple(keys), notes)


def table_chart(table: TableRecord) -> Chart | None:
    """Milliseconds of each algorithm by size, a dot where it is the choice; None for a table without rows."""
    if not table.rows:
        return None
    rows = [Row(row.num_bytes, row.milliseconds) for row in table.rows]
    with style():
        figure, axes = _small_figure()
        plot_rows(axes, rows, [row.choice for row in table.rows])
        axes.set_xlabel("size on the wire")
        svg = to_svg(figure, "table", "Milliseconds of each all-reduce algorithm by message size")
    algorithms = algorithms_in(row.milliseconds for row in rows)
    keys = [Key(name, color) for name, color in zip(algorithms, SERIES, strict=False)]
    return Chart("Milliseconds by size", svg, tuple(keys), ("A dot marks the choice at that size.",))


def _small_figure() -> tuple["Figure", "Axes"]:
    """A figure of WIDTH x HEIGHT with margins that are the same in every chart, so that those in a row align."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    left, bottom, right, top = 46, 38, 12, 10
    size = ((WIDTH - left - right) / WIDTH, (HEIGHT - bottom - top) / HEIGHT)
    return figure, figure.add_axes((left / WIDTH, bottom / HEIGHT, *size))


def _plot(axes: "Axes", line: Line) -> None:
    """Draws a line, or dots where the line has one point only."""
    series = line.series.thinned()
    if line.style == "dots" or len(series.steps) == 1:
        axes.plot(series.steps, series.values, "o", color=line.color, ms=4.5, mew=0)
    else:
        dashes = (0, (4, 3)) if line.style == "dashes" else "-"
        axes.plot(series.steps, series.values, color=line.color, linestyle=dashes)


def _set_ticks(axes: "Axes", percent: bool, powers_of_two: bool) -> None:
    """At most five or six ticks a side, with labels as short as they can be."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda value, _: tick_label(value))
    if powers_of_two:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(2, numticks=6))
        axes.yaxis.set_major_formatter(lambda value, _: f"2^{np.log2(value):g}")
        axes.minorticks_off()
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %" if percent else tick_label(value))
