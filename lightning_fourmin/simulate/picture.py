"""The picture of a prediction: how throughput grows with the ranks, and where the time of one step goes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_fourmin.simulate.scenario import Prediction, Scenario
from lightning_fourmin.simulate.step import Span
from lightning_fourmin.svg import MUTED, SERIES, log_axes, style, to_svg, wide_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

BLUE, ORANGE, GREEN, PURPLE, YELLOW = SERIES[:5]
COMPUTE_COLORS = {"forward": BLUE, "backward": GREEN, "optimizer step": PURPLE}
BUCKET_COLORS = (ORANGE, YELLOW)
"""The colours of buckets with even and odd numbers, so that neighbours can be told apart."""


def draw(scenario: Scenario, curves: Mapping[str, Sequence[Prediction]]) -> str:
    """The content of an SVG file: throughput of each of `curves` by ranks, and the timeline of a step of `scenario`."""
    with style():
        figure, (growth, timeline) = wide_figure(4.2, 2)
        every_technique = next(iter(curves.values()))
        ranks = [point.N for point in every_technique]
        growth.plot(ranks, [point.S * point.N for point in every_technique], color=MUTED, linestyle=":", label="ideal")
        for name, curve in curves.items():
            growth.plot(ranks, [point.T for point in curve], marker="o", ms=3, label=name)
        # Ranks double from point to point, and throughput nearly does.
        log_axes(growth, x_base=2, y_base=10)
        growth.set_xticks(ranks[::3], [f"{number:,}" for number in ranks[::3]])
        growth.set_xlabel("ranks")
        growth.set_title(f"Predicted throughput on {scenario.cluster.name}, samples/s")
        growth.legend(fontsize=9)

        plot_step(timeline, scenario.step.spans)
        timeline.set_xlabel("ms")
        timeline.set_title(f"A step on {scenario.num_ranks} ranks: {scenario.prediction.step_ms:.1f} ms")
        figure.legend(handles=step_legend(), loc="outside upper right", ncols=4)
        label = f"Predicted throughput by ranks and one step of {scenario.num_ranks} ranks on {scenario.cluster.name}"
        return to_svg(figure, "plan", label, standalone=True) + "\n"


def plot_step(axes: "Axes", spans: Sequence[Span], lanes: Sequence[str] = ()) -> None:
    """Draws a bar for each span in its lane. `lanes` are those from top to bottom, by default those of the spans."""
    lanes = lanes or list(dict.fromkeys(span.lane for span in spans))
    for span in spans:
        start_ms, took_ms = 1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)
        color = COMPUTE_COLORS.get(span.name) or BUCKET_COLORS[int(span.name.removeprefix("bucket ")) % 2]
        axes.barh(lanes.index(span.lane), took_ms, left=start_ms, height=0.7, color=color, linewidth=0)
    axes.set_yticks(range(len(lanes)), ["compute" if lane == "main" else lane for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.grid(False)
    axes.margins(x=0.01)


def step_legend() -> list["Patch"]:
    """What the colours of `plot_step` mean."""
    from matplotlib.patches import Patch

    colors = {**COMPUTE_COLORS, "buckets": ORANGE}
    return [Patch(color=color, label=name) for name, color in colors.items()]
