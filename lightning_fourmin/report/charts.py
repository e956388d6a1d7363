"""One small chart: lines over the steps of a run, with what it leaves out said in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_fourmin.report.svg import INK, MUTED, SETTINGS, VARIABLES, to_svg
from lightning_fourmin.runs.metrics import Series
from lightning_fourmin.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 372, 216
"""In CSS pixels: about a column on a desk and the width of a phone, so that text has its size on both."""


@dataclass(frozen=True)
class Line:
    label: str
    series: Series
    color: str = INK
    style: Literal["line", "dashes", "dots"] = "line"
    in_key: bool = True

    @property
    def css_color(self) -> str:
        return VARIABLES[self.color]


@dataclass(frozen=True)
class Chart:
    """A picture with the texts around it."""

    title: str
    svg: str
    lines: tuple[Line, ...] = ()
    """For the key."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """How values become heights."""

    percent: bool = False
    from_zero: bool = False
    log_base: int | None = None


LINEAR = Scale()


def line_chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    scale: Scale = LINEAR,
    marked_steps: Sequence[int] = (),
) -> Chart | None:
    """None if there is nothing to draw."""
    lines = [line for line in lines if len(line.series.steps) or line.series.num_bad]
    if not lines:
        return None
    notes = [_not_finite(line) for line in lines if line.series.num_bad]
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure = small_figure()
        axes = figure.axes[0]
        for line in lines:
            plot_line(axes, line)
        for step in marked_steps:
            axes.axvline(step, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
        finish(axes, scale)
        axes.set_xlabel("step")
        labels = ", ".join(line.label for line in lines if line.in_key)
        svg = to_svg(figure, name, f"{title} over the steps of the run: {labels}")
    return Chart(title, svg, tuple(lines), tuple(notes))


def small_figure() -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    left, bottom, right, top = 46, 38, 12, 10
    figure.add_axes((left / WIDTH, bottom / HEIGHT, (WIDTH - left - right) / WIDTH, (HEIGHT - bottom - top) / HEIGHT))
    return figure


def plot_line(axes: "Axes", line: Line) -> None:
    series = line.series.thinned()
    # A single point makes no line.
    if line.style == "dots" or len(series.steps) == 1:
        axes.plot(series.steps, series.values, "o", color=line.color, ms=4.5, mew=0)
        return
    dashes = (0, (4, 3)) if line.style == "dashes" else "-"
    axes.plot(series.steps, series.values, color=line.color, linestyle=dashes)


def finish(axes: "Axes", scale: Scale) -> None:
    """Ticks that people can read, and the range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    if scale.log_base:
        axes.set_yscale("log", base=scale.log_base)
        axes.yaxis.set_major_locator(LogLocator(scale.log_base, numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if scale.log_base == 2:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2^{np.log2(value):g}"))
    elif scale.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    if scale.from_zero:
        axes.set_ylim(bottom=0)


def tick(value: float) -> str:
    """1500 as 1.5k."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{letter}"
    return f"{value:g}"


def _not_finite(line: Line) -> str:
    series = line.series
    return (
        f"{plural(series.num_bad, 'value')} of {line.label}, the first at step {series.first_bad_step:,}, "
        "cannot be drawn: not a finite number."
    )
