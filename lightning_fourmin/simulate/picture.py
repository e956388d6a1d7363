"""The picture of an outlook: how throughput grows with the ranks, and where the time of one step goes."""

import io
from collections.abc import Mapping, Sequence

from lightning_fourmin.simulate.scenario import Prediction, Scenario

COLORS = {"forward": "#4c78a8", "backward": "#72b7b2", "optimizer step": "#9ecae9"}
WIRE_COLORS = ("#f58518", "#e45756")
"""Of buckets with even and odd numbers."""


def draw(scenario: Scenario, curves: Mapping[str, Sequence[Prediction]]) -> str:
    """An SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    growth, timeline = figure.subplots(1, 2)
    everything = next(iter(curves.values()))
    ranks = [point.N for point in everything]
    growth.plot(ranks, [point.S * point.N for point in everything], color="0.6", linestyle=":", label="ideal")
    for name, curve in curves.items():
        growth.plot(ranks, [point.T for point in curve], marker=".", label=name)
    growth.set_xscale("log", base=2)
    growth.xaxis.set_major_formatter("{x:.0f}")
    growth.set_yscale("log")
    growth.set_xlabel("ranks")
    growth.set_ylabel("samples/s")
    growth.set_title(f"Predicted throughput on {scenario.cluster.name}")
    growth.grid(alpha=0.3)
    growth.legend(fontsize="small")

    spans = scenario.step.spans
    lanes = list(dict.fromkeys(span.lane for span in spans))
    for span in spans:
        color = COLORS.get(span.name) or WIRE_COLORS[int(span.name.removeprefix("bucket ")) % 2]
        bar = [(1e3 * span.start_s, 1e3 * (span.end_s - span.start_s))]
        timeline.broken_barh(bar, (lanes.index(span.lane) - 0.4, 0.8), facecolors=color)
    timeline.set_yticks(range(len(lanes)), lanes)
    timeline.invert_yaxis()
    timeline.set_xlabel("ms")
    timeline.set_title(f"A step on {scenario.num_ranks} ranks: {scenario.prediction.step_ms:.1f} ms")
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()
