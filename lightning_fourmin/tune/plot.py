"""Draws an all-reduce table: milliseconds by size for each algorithm, and the sizes at which the choice changes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.files import write_whole
from lightning_fourmin.svg import MUTED, SERIES, log_axes, style, to_svg, wide_figure
from lightning_fourmin.text import readable_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(table: AllReduceTable, path: Path) -> None:
    """Writes the picture of a table as an SVG file."""
    with style():
        figure, (axes,) = wide_figure(4.2)
        plot_rows(axes, table.rows, [table.choose(row.num_bytes) for row in table.rows])
        plot_switch_points(axes, table)
        axes.set_xlabel("size of a bucket on the wire; a dot marks the choice")
        shown = "ms, median and quartiles" if any(row.spread_ms for row in table.rows) else "ms"
        axes.set_title(f"All-reduce of {table.topology_key} on {table.backend} ({table.source}): {shown}")
        figure.legend(loc="outside upper right", ncols=4)
        label = f"Milliseconds of each all-reduce algorithm by size, {table.topology_key} on {table.backend}"
        write_whole(path, to_svg(figure, "table", label, standalone=True) + "\n")


def algorithms_in(milliseconds: Iterable[Mapping[str, float]]) -> list[str]:
    """The algorithms of a table's rows, in the order of the first row; a row may lack some."""
    return list(dict.fromkeys(name for row in milliseconds for name in row))


def plot_rows(axes: "Axes", rows: Sequence[Row], choices: Sequence[str]) -> None:
    """A line for each algorithm, with a dot at each size where it is the choice and a band where quartiles are known.

    Sizes and times go over several powers of ten, so both axes are logarithmic.
    """
    for name, color in zip(algorithms_in(row.milliseconds for row in rows), SERIES, strict=False):
        sizes = [row.num_bytes for row in rows if name in row.milliseconds]
        axes.plot(sizes, [row.milliseconds[name] for row in rows if name in row.milliseconds], color=color, label=name)
        chosen = [row for row, choice in zip(rows, choices, strict=True) if choice == name and name in row.milliseconds]
        times_ms = [row.milliseconds[name] for row in chosen]
        axes.plot([row.num_bytes for row in chosen], times_ms, "o", color=color, ms=5, mew=0)
        if all(name in row.spread_ms for row in rows):
            low_ms, high_ms = zip(*(row.spread_ms[name] for row in rows), strict=True)
            axes.fill_between(sizes, low_ms, high_ms, color=color, alpha=0.2, linewidth=0)
    log_axes(axes, x_base=4, y_base=10)
    # Labels of more than five sizes would touch.
    labelled = [rows[int(place)].num_bytes for place in np.linspace(0, len(rows) - 1, min(5, len(rows)))]
    axes.set_xticks(labelled, [readable_size(size) for size in labelled])


def plot_switch_points(axes: "Axes", table: AllReduceTable) -> None:
    """A dotted line at each size where the choice changes, with the names of both algorithms beside its top."""
    smallest, largest = table.rows[0].num_bytes, table.rows[-1].num_bytes
    for number, (size, below, above) in enumerate(table.switch_points()):
        axes.axvline(size, color=MUTED, linestyle=":", linewidth=1)
        # Curves rise to the right, so the place on the left of a line is free, but in the left half it is too narrow.
        side, shift = ("right", -5) if size * size > smallest * largest else ("left", 5)
        axes.annotate(
            f"{readable_size(size)}: {below} to {above}",
            (size, 0.95 - 0.08 * number),
            (shift, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=9,
        )
