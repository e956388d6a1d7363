"""Draws a table: milliseconds by size for each algorithm, and the sizes at which the choice changes."""

from pathlib import Path

from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.text import readable_size


def draw(table: AllReduceTable, path: Path) -> None:
    """Writes the picture in the format that the path ends with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [row.num_bytes for row in table.rows]
    for name in table.rows[0].milliseconds:
        (line,) = axes.plot(sizes, [row.milliseconds[name] for row in table.rows], marker=".", label=name)
        if all(name in row.spread_ms for row in table.rows):
            low, high = zip(*(row.spread_ms[name] for row in table.rows), strict=True)
            axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    for size, below, above in table.switch_points():
        axes.axvline(size, color="grey", linestyle=":", linewidth=1)
        # Curves rise from the lower left to the upper right: the other corners are free.
        height, edge = (0.98, "top") if size * size < sizes[0] * sizes[-1] else (0.02, "bottom")
        text = f"{readable_size(size)}: {below} to {above}"
        axes.annotate(
            text, (size, height), xycoords=("data", "axes fraction"), rotation=90, va=edge, ha="right", fontsize=7
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: readable_size(round(size)))
    axes.set_xlabel("size of a bucket on the wire")
    axes.set_ylabel("ms, median and quartiles")
    axes.set_title(f"All-reduce of {table.topology_key} on {table.backend} ({table.source})", fontsize=10)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
