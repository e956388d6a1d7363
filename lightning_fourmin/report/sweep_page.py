"""`sweep.csv`, `sweep.md` and `report.html` of a sweep: all of its jobs side by side."""

import csv
import html
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from lightning_fourmin.files import write_whole
from lightning_fourmin.report.charts import Chart, Line, LineStyle, line_chart
from lightning_fourmin.report.run_page import PAGE_NAME, write_page
from lightning_fourmin.runs.record import Summary
from lightning_fourmin.runs.sweep import Job, best_job, differing_keys, read_jobs, shared_settings
from lightning_fourmin.svg import FAINT, SERIES, VARIABLES
from lightning_fourmin.text import duration, grouped, percent, plural, printable, rounded, whole

_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "top1": ("top-1", percent),
    "top5": ("top-5", percent),
    "val_loss": ("val. loss", rounded),
    "steps": ("steps", whole),
    "images_per_s": ("images/s", whole),
    "S": ("S", whole),
    "N": ("N", whole),
    "e": ("e", percent),
    "step_ms": ("step ms", rounded),
    "exposed_ms": ("exposed ms", rounded),
    "skipped_steps": ("skipped", whole),
}
"""The fields of a summary that page and Markdown show, with heading and form; sweep.csv has all fields."""


def write_sweep(folder: Path) -> Path:
    """Writes the three files into `folder`, which holds a run folder for each job, and returns the path of the page."""
    jobs = read_jobs(folder)
    colors = _job_colors(jobs)
    heads, rows = _table(jobs)
    write_whole(folder / "sweep.csv", _csv(jobs))
    write_whole(folder / "sweep.md", _markdown(jobs))
    page = folder / PAGE_NAME
    write_page(
        page,
        "sweep.html",
        name=next((job.record.name for job in jobs if job.record), folder.name),
        outcome=_outcome(jobs),
        command=next((job.record.command for job in jobs if job.record), None),
        jobs=jobs,
        best=best_job(jobs),
        colors={number: VARIABLES[color] for number, color in colors.items()},
        num_colors=len(SERIES),
        heads=heads,
        rows=dict(zip((job.number for job in jobs), rows, strict=True)),
        num_settings=len(differing_keys(jobs)),
        shared=shared_settings(jobs),
        charts=_charts(jobs, colors),
        has_page={job.number for job in jobs if (job.folder / PAGE_NAME).is_file()},
    )
    return page


def _job_colors(jobs: list[Job]) -> dict[int, str]:
    """A colour for each job by number. If jobs are more than colours, the best get one and the others are faint."""
    order = sorted(jobs, key=lambda job: -(job.summary.top1 or 0.0)) if len(jobs) > len(SERIES) else jobs
    colored = sorted(job.number for job in order[: len(SERIES)])
    return {job.number: FAINT for job in jobs} | dict(zip(colored, SERIES, strict=False))


def _table(jobs: list[Job]) -> tuple[list[str], list[list[str]]]:
    """The headings after job and status, and for each job the texts below them, which are empty for missing values.

    The columns are the settings that differ, the figures that at least one job has, and the time.
    """
    keys, figures = differing_keys(jobs), [asdict(job.summary) for job in jobs]
    shown = {name: form for name, form in _FIGURES.items() if any(one[name] is not None for one in figures)}
    rows = []
    for job, values in zip(jobs, figures, strict=True):
        seconds = job.record.seconds if job.record else None
        rows.append(
            [
                *(job.settings.get(key, "") for key in keys),
                *("" if values[name] is None else form(values[name]) for name, (_, form) in shown.items()),
                "" if seconds is None else duration(seconds),
            ]
        )
    return [*keys, *(head for head, _ in shown.values()), "time"], rows


def _outcome(jobs: list[Job]) -> str:
    """How the jobs ended and which is the best, as a sentence or two."""
    number = Counter(job.status for job in jobs)
    text = f"{plural(len(jobs), 'job')}: {', '.join(f'{n} {status}' for status, n in number.items())}."
    if best := best_job(jobs):
        setting = ", ".join(f"{key}={best.settings.get(key, '')}" for key in differing_keys(jobs))
        text += f" Best top-1 accuracy: {percent(best.summary.top1 or 0.0)} in job {best.number}"
        text += f" ({setting})" if setting else ""
        equal = [str(job.number) for job in jobs if job is not best and job.summary.top1 == best.summary.top1]
        text += f", the same in {'jobs' if len(equal) > 1 else 'job'} {grouped(equal)}." if equal else "."
    return text


def _charts(jobs: list[Job], colors: dict[int, str]) -> list[Chart]:
    """The charts, with a curve for each job. Faint jobs have no key, and are drawn first so that they lie behind."""
    numbered = {job.number: job.metrics for job in sorted(jobs, key=lambda job: colors[job.number] != FAINT)}

    def lines(column: str) -> list[Line]:
        found: list[Line] = []
        for number, metrics in numbered.items():
            if (series := metrics.get(column)) is not None:
                # Dashes, between which a curve below that is exactly the same can be seen.
                is_hidden = any(np.array_equal(series.values, line.series.values) for line in found)
                style: LineStyle = "dashes" if is_hidden else "line"
                found.append(Line(f"job {number}", series, colors[number], style, colors[number] != FAINT))
        return found

    charts = [
        line_chart("top1", "Validation top-1 accuracy", lines("val/top1"), percent=True),
        line_chart("train-loss", "Training loss", lines("train/loss")),
        line_chart("val-loss", "Validation loss", lines("val/loss")),
        line_chart("rate", "Learning rate", lines("lr"), from_zero=True),
        line_chart("images", "Images per second", lines("fourmin/T"), from_zero=True),
        line_chart("efficiency", "Efficiency e", lines("fourmin/e"), percent=True, from_zero=True),
    ]
    return [chart for chart in charts if chart is not None]


def _csv(jobs: list[Job]) -> str:
    """All settings and figures of each job, not rounded."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.settings))
    names = [field.name for field in fields(Summary)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", "status", *keys, *names, "seconds", "error"])
    for job in jobs:
        settings = [printable(job.settings.get(key, "")) for key in keys]
        seconds = job.record.seconds if job.record else None
        writer.writerow(
            [job.number, job.status, *settings, *asdict(job.summary).values(), seconds, printable(job.error or "")]
        )
    return text.getvalue()


def _markdown(jobs: list[Job]) -> str:
    """The table of the page, and the errors below it."""
    (heads, rows), keys, shared = _table(jobs), differing_keys(jobs), shared_settings(jobs)
    table = [["job", "status", *heads], ["---", "---", *("---" if head in keys else "---:" for head in heads)]]
    table += [[str(job.number), job.status, *row] for job, row in zip(jobs, rows, strict=True)]
    lines = ["# Sweep", "", _escaped(_outcome(jobs)), ""]
    if shared:
        lines += [_escaped(f"The same in all jobs: {', '.join(shared)}."), ""]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in table]
    for job in jobs:
        if job.error:
            lines += ["", f"Job {job.number}, {job.status}:", ""]
            lines += [f"    {line}" for line in printable(job.error).splitlines()]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A text from outside as one line of a Markdown table."""
    return html.escape(" ".join(printable(text).split()), quote=False).replace("|", "\\|")
