"""The picture of a prediction: what waiting costs a step as ranks are added, and where the time of one step goes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_fourmin.simulate.scenario import Prediction, Scenario
from lightning_fourmin.simulate.step import Span
from lightning_fourmin.svg import SERIES, log_axes, style, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

BLUE, ORANGE, GREEN, PURPLE, YELLOW = SERIES[:5]
COMPUTE_COLORS = {"forward": BLUE, "backward": GREEN, "optimizer step": PURPLE}
BUCKET_COLORS = (ORANGE, YELLOW)
"""The colours of buckets with even and odd numbers, so that neighbours can be told apart."""


def draw(scenario: Scenario, curves: Mapping[str, Sequence[Prediction]]) -> str:
    """The content of an SVG file: exposed ms of each of `curves` by ranks, and the timeline of a step of `scenario`.

    One lies above the other, so that both can be read on a phone.
    """
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 7.2), layout="constrained")
        growth, timeline = figure.subplots(2, 1)
        for name, curve in curves.items():
            # One rank waits for nobody, and a logarithmic axis has no 0.
            waiting = [point for point in curve if point.exposed_ms > 0]
            growth.plot([point.N for point in waiting], [point.exposed_ms for point in waiting], "o-", ms=3, label=name)
        log_axes(growth, x_base=2, y_base=10)
        ranks = [point.N for point in next(iter(curves.values()))]
        growth.set_xticks(ranks[::3], [f"{number:,}" for number in ranks[::3]])
        growth.set_xlabel("ranks")
        growth.set_title(f"Waiting in a step on {scenario.cluster.name}, ms")
        growth.legend(fontsize=9)

        plot_step(timeline, scenario.step.spans)
        timeline.set_xlabel("ms")
        timeline.set_title(f"A step on {scenario.num_ranks} ranks: {scenario.prediction.step_ms:.1f} ms")
        timeline.legend(handles=step_legend(), loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, fontsize=9)
        label = f"Predicted waiting by ranks and one step of {scenario.num_ranks} ranks on {scenario.cluster.name}"
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
