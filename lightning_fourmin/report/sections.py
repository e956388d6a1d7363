"""The sections of a run's page that hold curves: learning, precision and throughput."""

from dataclasses import dataclass

import numpy as np

from lightning_fourmin.report.charts import Chart, Line, line_chart
from lightning_fourmin.runs.metrics import Metrics, resumed_steps
from lightning_fourmin.runs.record import RunRecord, Summary
from lightning_fourmin.svg import ALARM, MUTED, SERIES
from lightning_fourmin.text import percent, plural, rounded, whole

BLUE, ORANGE, GREEN = SERIES[:3]
NO_CURVE = "There is no curve: nothing was logged, as in a run of fewer steps than trainer.log_every_n_steps."


@dataclass(frozen=True)
class Section:
    """A heading with sentences and charts below it."""

    title: str
    sentences: tuple[str, ...]
    charts: tuple[Chart, ...] = ()


def learning(metrics: Metrics) -> Section:
    """What the net learned: validation accuracy, loss and learning rate."""
    resumed = resumed_steps(metrics)
    accuracies = [*_line(metrics, "val/top1", "top-1", BLUE), *_line(metrics, "val/top5", "top-5", ORANGE)]
    losses = [*_line(metrics, "train/loss", "training", BLUE), *_line(metrics, "val/loss", "validation", ORANGE)]
    rates = _line(metrics, "lr", "rate of group 0", BLUE)
    charts = _drawn(
        line_chart("accuracy", "Validation accuracy", accuracies, percent=True, marked_steps=resumed),
        line_chart("loss", "Loss", losses, marked_steps=resumed),
        line_chart("rate", "Learning rate", rates, from_zero=True, marked_steps=resumed),
    )
    drawn = {chart.title for chart in charts}
    missing = [title.lower() for title in ("Validation accuracy", "Loss", "Learning rate") if title not in drawn]
    return Section("Learning", (f"Not logged: {', '.join(missing)}.",) if missing else (), charts)


def precision(metrics: Metrics, summary: Summary) -> Section | None:
    """The loss scale and the steps that were skipped; None for a run without a loss scale."""
    scale, skipped = metrics.get("fourmin/loss_scale"), metrics.get("fourmin/skipped_steps")
    if scale is None and summary.loss_scale is None:
        return None
    number = summary.skipped_steps
    if number is None:
        text = "How many steps were skipped was not logged."
    elif number == 0:
        text = "No step was skipped: every gradient was finite."
    else:
        of_all = f" of {whole(summary.steps)}" if summary.steps else ""
        text = f"{plural(number, 'step')}{of_all} skipped, because a gradient was not finite."
        if scale is not None and (np.diff(scale.values) < 0).any():
            text += " The loss scale fell."
    if scale is None:
        return Section("Precision", (text, NO_CURVE))
    lines = [Line("loss scale", scale, BLUE)]
    if skipped is not None:
        rises = skipped.steps[np.diff(skipped.values, prepend=0) > 0]
        lines.append(Line("a step was skipped", scale.at(rises), ALARM, style="dots"))
    # The scale is a power of two that is doubled and halved.
    chart = line_chart("loss-scale", "Loss scale", lines, powers_of_two=True, marked_steps=resumed_steps(metrics))
    return Section("Precision", (text,), _drawn(chart))


def throughput(metrics: Metrics, record: RunRecord, summary: Summary) -> Section | None:
    """T beside S x N, the efficiency e, which is their quotient, and where the time of a step goes; None if unknown."""
    images = _line(metrics, "fourmin/T", "T, measured", BLUE)
    if images and "fourmin/S" in metrics and "fourmin/N" in metrics:
        ideal = metrics["fourmin/S"].times(metrics["fourmin/N"])
        images.append(Line("S x N, without waits", ideal, MUTED, style="dashes"))
    efficiency = _line(metrics, "fourmin/e", "T / (S x N)", BLUE)
    times = [
        *_line(metrics, "fourmin/step_ms", "step", BLUE),
        *_line(metrics, "fourmin/comm_ms", "communication", GREEN),
        *_line(metrics, "fourmin/exposed_ms", "waiting", ORANGE),
    ]
    resumed = resumed_steps(metrics)
    charts = _drawn(
        line_chart("images", "Images per second", images, from_zero=True, marked_steps=resumed),
        line_chart("efficiency", "Efficiency e", efficiency, percent=True, from_zero=True, marked_steps=resumed),
        line_chart("times", "Milliseconds a step", times, from_zero=True, marked_steps=resumed),
    )
    if not charts and summary.S is None:
        return None
    sentences = []
    if record.world_size == 1:
        sentences.append("One rank: there is nothing to communicate.")
    elif summary.step_ms and summary.exposed_ms is not None:
        share = summary.exposed_ms / summary.step_ms
        sentences.append(
            f"Of a step of {rounded(summary.step_ms)} ms, a rank waited {rounded(summary.exposed_ms)} ms "
            f"({percent(share)}) for communication that computing did not hide."
        )
        # Runs of version 0.1 have measured e in another way.
        if summary.e_low is not None and summary.e_high is not None:
            sentences.append(
                f"The rest, {percent(1 - share)}, is e; half of the steps had {percent(summary.e_low)} to "
                f"{percent(summary.e_high)}. Waits were timed in every step; figures are medians over the steps since "
                "the last start, then means over ranks."
            )
    if not charts:
        sentences.append(NO_CURVE)
    return Section("Throughput", tuple(sentences), charts)


def _line(metrics: Metrics, name: str, label: str, color: str) -> list[Line]:
    """The line of a metric, or none if it was not logged."""
    return [Line(label, metrics[name], color)] if name in metrics else []


def _drawn(*charts: Chart | None) -> tuple[Chart, ...]:
    """The charts that have something to show."""
    return tuple(chart for chart in charts if chart is not None)
