"""One small chart: lines over the steps of a run, with what it leaves out said in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_fourmin.report.svg import INK, MUTED, SETTINGS, VARIABLES, to_svg
from lightning_fourmin.runs.metrics import Series
from lightning_fourmin.text import plural, rounded

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
    style: Literal["line", "noisy", "dashes", "dots"] = "line"
    """noisy: a long series as its trend, with all values faintly behind."""
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
    top: float | None = None


LINEAR = Scale()


def line_chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    scale: Scale = LINEAR,
    unit: str = "",
    marked_steps: Sequence[int] = (),
) -> Chart | None:
    """None if there is nothing to draw."""
    lines = [line for line in lines if len(line.series.steps) or line.series.num_bad]
    if not lines:
        return None
    notes = [_not_finite(line) for line in lines if line.series.num_bad]
    if any(line.style == "noisy" and line.series.is_long for line in lines):
        notes.append("Faint: each value. Line: the median of a stretch.")
    drawn = [line for line in lines if len(line.series.steps)]
    if drawn and scale.top is not None:
        notes += _left_out(drawn, scale.top, unit)
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure = small_figure()
        axes = figure.axes[0]
        for line in drawn:
            plot_line(axes, line)
        for step in marked_steps:
            axes.axvline(step, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
        finish(axes, scale)
        axes.set_xlabel("step")
        labels = ", ".join(line.label for line in lines if line.in_key)
        svg = to_svg(figure, name, f"{title} over the steps of the run: {labels}")
    return Chart(title, svg, tuple(lines), tuple(notes))


def loss_chart(name: str, title: str, lines: Sequence[Line], marked_steps: Sequence[int] = ()) -> Chart | None:
    """Logarithmic where the end would be a flat line otherwise."""
    values = np.concatenate([line.series.values for line in lines]) if lines else np.zeros(0)
    if len(values) > 1 and 0 < values.min() * 30 < values.max():
        return line_chart(name, f"{title}, logarithmic", lines, Scale(log_base=10), marked_steps=marked_steps)
    return line_chart(name, title, lines, marked_steps=marked_steps)


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
    if line.style == "noisy" and line.series.is_long:
        axes.plot(series.steps, series.values, color=line.color, alpha=0.25, linewidth=0.8)
        series = line.series.smoothed()
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
    if scale.top is not None:
        axes.set_ylim(top=scale.top)


def tick(value: float) -> str:
    """1500 as 1.5k."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{letter}"
    return f"{value:g}"


def top_without_outliers(lines: Sequence[Line]) -> float | None:
    """A top for the picture if few values, such as those of a first step, would flatten all others."""
    values = np.concatenate([line.series.values for line in lines]) if lines else np.zeros(0)
    if not len(values):
        return None
    usual = float(np.quantile(values, 0.98)) * 1.1
    return usual if values.max() > 2 * usual > 0 else None


def _left_out(lines: Sequence[Line], top: float, unit: str) -> list[str]:
    values = np.concatenate([line.series.values for line in lines])
    above = int((values > top).sum())
    verb = "lies" if above == 1 else "lie"
    return [f"{plural(above, 'value')} {verb} above the picture, up to {rounded(values.max())}{unit}."] if above else []


def _not_finite(line: Line) -> str:
    series = line.series
    return (
        f"{plural(series.num_bad, 'value')} of {line.label}, the first at step {series.first_bad_step:,}, "
        "cannot be drawn: not a finite number."
    )
