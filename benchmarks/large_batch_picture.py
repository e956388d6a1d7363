"""The large-batch table as a picture: a dot a seed, a line a row."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from large_batch_runs import Row
from matplotlib.figure import Figure

import lightning_fourmin.report
from lightning_fourmin.report.svg import MUTED, SERIES, SETTINGS, to_svg

ROW_INCHES = 0.3


def picture(rows: Mapping[str, Row], labels: Mapping[str, str], models: Mapping[str, str]) -> str:
    """Stands alone, light and dark. `labels` are the rows to draw in their order; `models` titles by first word."""
    drawn = {model: [name for name in labels if name.startswith(f"{model}_")] for model in models}
    drawn = {model: names for model, names in drawn.items() if names}
    heights = [len(names) for names in drawn.values()]
    style = (Path(lightning_fourmin.report.__file__).parent / "templates" / "theme.css").read_text()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9.5, ROW_INCHES * sum(heights) + 1.2 * len(heights)), layout="constrained")
        all_axes = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (model, names) in zip(all_axes, drawn.items(), strict=True):
            for place, name in enumerate(names):
                row = rows[name]
                axes.plot(row.top1, [place] * len(row.top1), "o", color=SERIES[0], ms=5, mew=0, alpha=0.5)
                axes.plot([row.mean], [place], "|", color=SERIES[1], ms=14, mew=2)
            axes.axvline(rows[names[0]].mean, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
            axes.set_yticks(range(len(names)), [f"{labels[name]} ({rows[name].batch:,})" for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(
                f"{models[model]}: top-1 on CIFAR-10, %; dots: seeds, bars: means, dotted: {labels[names[0]]}"
            )
        return to_svg(figure, "large-batch", "Top-1 of each row", style + "svg { background: var(--paper); }")
