"""The all-reduce table as a chart: milliseconds by size, with the choices."""

from collections.abc import Sequence

import numpy as np

from lightning_fourmin.report.charts import Chart, Line, Scale, finish, small_figure
from lightning_fourmin.report.svg import SERIES, SETTINGS, to_svg
from lightning_fourmin.runs.metrics import Series
from lightning_fourmin.runs.record import TableRecord
from lightning_fourmin.text import readable_size


def algorithms_of(table: TableRecord) -> list[str]:
    """In the order of the table's first row; a row may lack some."""
    return list(dict.fromkeys(name for row in table.rows for name in row.milliseconds))


def table_chart(table: TableRecord) -> Chart | None:
    """Milliseconds of each algorithm by size, a dot where it is the choice; None for a table without rows."""
    if not table.rows:
        return None
    import matplotlib
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lines = [_line(table, name, color) for name, color in zip(algorithms_of(table), SERIES, strict=False)]
    with matplotlib.rc_context(SETTINGS):
        figure = small_figure()
        axes = figure.axes[0]
        for line in lines:
            axes.plot(line.series.steps, line.series.values, color=line.color)
            chosen = [row.num_bytes for row in table.rows if row.choice == line.label]
            dots = line.series.at(np.array(chosen))
            axes.plot(dots.steps, dots.values, "o", color=line.color, ms=5, mew=0)
        axes.set_xscale("log", base=4)
        finish(axes, Scale(log_base=10))
        axes.xaxis.set_major_locator(FixedLocator(_few([row.num_bytes for row in table.rows])))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_size(value)))
        svg = to_svg(figure, "table", "Milliseconds of each all-reduce algorithm by message size")
    return Chart("Milliseconds by size", svg, tuple(lines), ("A dot marks the choice at that size.",))


def _line(table: TableRecord, name: str, color: str) -> Line:
    points = [(row.num_bytes, row.milliseconds[name]) for row in table.rows if name in row.milliseconds]
    sizes, times = zip(*points, strict=True)
    return Line(name, Series(np.array(sizes, float), np.array(times, float)), color)


def _few(sizes: Sequence[int]) -> list[int]:
    """At most five of the sizes, evenly spread, so that their labels do not touch."""
    return [sizes[int(place)] for place in np.linspace(0, len(sizes) - 1, min(5, len(sizes)))]
