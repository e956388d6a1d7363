"""The sections of a run's page that hold curves: learning, precision, throughput."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lightning_fourmin.report.chart import Chart, Line, Scale, line_chart, top_without_outliers
from lightning_fourmin.report.metrics import Metrics
from lightning_fourmin.report.run_files import RunRecord, Summary
from lightning_fourmin.report.svg import ALARM, MUTED, SERIES
from lightning_fourmin.report.words import percent, plural, rounded, whole

BLUE, ORANGE, GREEN = SERIES[:3]


@dataclass(frozen=True)
class Section:
    title: str
    sentences: tuple[str, ...]
    charts: tuple[Chart, ...]


def learning(metrics: Metrics) -> Section:
    accuracy = line_chart(
        "accuracy",
        "Validation accuracy",
        [*_line(metrics, "val/top1", "top-1", BLUE), *_line(metrics, "val/top5", "top-5", ORANGE)],
        Scale(percent=True),
    )
    losses = [*smoothed(metrics, "train/loss", "training", BLUE), *_line(metrics, "val/loss", "validation", ORANGE)]
    loss = line_chart("loss", "Loss", losses, _loss_scale_of(losses))
    rate = line_chart("rate", "Learning rate", _line(metrics, "lr", "rate", BLUE), Scale(from_zero=True))
    missing = [
        name
        for name, chart in (("validation accuracy", accuracy), ("loss", loss), ("learning rate", rate))
        if chart is None
    ]
    sentences = [f"Not logged: {', '.join(missing)}."] if missing else []
    return Section("Learning", tuple(sentences), _there(accuracy, loss, rate))


def precision(metrics: Metrics, summary: Summary) -> Section:
    scale, skipped = metrics.get("fourmin/loss_scale"), metrics.get("fourmin/skipped_steps")
    if scale is None:
        return Section("Precision", ("No loss scale was logged: FourMinPrecision was not in use.",), ())
    lines = [Line("loss scale", scale, BLUE)]
    if skipped is not None:
        rises = skipped.steps[np.diff(skipped.values, prepend=0) > 0]
        lines.append(Line("a step was skipped", scale.at(rises), ALARM, style="dots"))
    chart = line_chart("loss-scale", "Loss scale", lines, Scale(log_base=2))
    number = summary.skipped_steps
    if number is None:
        text = "How many steps were skipped was not logged."
    elif number == 0:
        text = "No step was skipped: every gradient was finite."
    else:
        of_all = f" of {whole(summary.steps)}" if summary.steps else ""
        text = f"{plural(number, 'step')}{of_all} skipped, because a gradient was not finite; the loss scale fell."
    return Section("Precision", (text,), _there(chart))


def throughput(metrics: Metrics, record: RunRecord, summary: Summary) -> Section:
    images = _line(metrics, "fourmin/T", "T, measured", BLUE)
    if images and "fourmin/S" in metrics and "fourmin/N" in metrics:
        ideal = metrics["fourmin/S"].times(metrics["fourmin/N"])
        images.append(Line("S x N, without waits", ideal, MUTED, style="dashes"))
    times = [
        *_line(metrics, "fourmin/step_ms", "step", BLUE),
        *_line(metrics, "fourmin/comm_ms", "communication", GREEN),
        *_line(metrics, "fourmin/exposed_ms", "exposed communication", ORANGE),
    ]
    charts = _there(
        line_chart("images", "Images per second", images, _from_zero(images)),
        line_chart("efficiency", "Efficiency e", _line(metrics, "fourmin/e", "e", BLUE), Scale(True, from_zero=True)),
        line_chart("times", "Milliseconds a step", times, _from_zero(times), " ms"),
    )
    if not charts:
        return Section("Throughput", ("Throughput was not logged: add ScalingMonitor to the callbacks.",), ())
    return Section("Throughput", tuple(_in_words(record, summary)), charts)


def smoothed(metrics: Metrics, name: str, label: str, color: str) -> list[Line]:
    """A noisy value as its mean, with the values themselves faintly behind."""
    lines = _line(metrics, name, label, color)
    if not lines or len(lines[0].series.steps) < 150:
        return lines
    return [Line(f"{label}, each step", lines[0].series, color, 0.3), Line(label, lines[0].series.averaged(), color)]


def _in_words(record: RunRecord, summary: Summary) -> Iterable[str]:
    if record.world_size == 1:
        yield "One rank: there is nothing to communicate."
    elif summary.step_ms and summary.exposed_ms is not None:
        yield (
            f"Of a step of {rounded(summary.step_ms)} ms, {rounded(summary.exposed_ms)} ms "
            f"({percent(summary.exposed_ms / summary.step_ms)}) waited for communication that compute did not hide."
        )


def _line(metrics: Metrics, name: str, label: str, color: str) -> list[Line]:
    return [Line(label, metrics[name], color)] if name in metrics else []


def _there(*charts: Chart | None) -> tuple[Chart, ...]:
    return tuple(chart for chart in charts if chart is not None)


def _from_zero(lines: list[Line]) -> Scale:
    return Scale(from_zero=True, top=top_without_outliers(lines))


def _loss_scale_of(lines: list[Line]) -> Scale:
    """Logarithmic where a run begins so high that its end would be a flat line."""
    values = np.concatenate([line.series.values for line in lines]) if lines else np.zeros(0)
    wide = len(values) > 1 and values.min() > 0 and values.max() > 30 * values.min()
    return Scale(log_base=10) if wide else Scale()
