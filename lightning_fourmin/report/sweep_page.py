"""A sweep as table and page: all its jobs side by side."""

import csv
import html
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from lightning_fourmin.files import write_whole
from lightning_fourmin.report.charts import Chart, Line, Scale, line_chart
from lightning_fourmin.report.run_page import PAGE_NAME, write_page
from lightning_fourmin.report.svg import FAINT, VARIABLES
from lightning_fourmin.runs.record import Summary
from lightning_fourmin.runs.sweep import Job, best_job, differing_keys, job_colors, read_jobs, shared_settings
from lightning_fourmin.text import duration, percent, plural, printable, rounded, whole


def write_sweep(folder: Path) -> Path:
    """Writes sweep.csv, sweep.md and report.html of a folder with one run folder a job; gives the page."""
    jobs = read_jobs(folder)
    colors = job_colors(jobs)
    write_whole(folder / "sweep.csv", _csv(jobs))
    write_whole(folder / "sweep.md", _markdown(jobs))
    page = folder / PAGE_NAME
    write_page(
        page,
        "sweep.html",
        name=next((job.record.name for job in jobs if job.record), folder.name),
        outcome=_outcome(jobs),
        jobs=jobs,
        best=best_job(jobs),
        colors={number: VARIABLES[color] for number, color in colors.items()},
        heads=_heads(jobs),
        rows={job.number: _cells(job, jobs) for job in jobs},
        num_settings=len(differing_keys(jobs)),
        shared=shared_settings(jobs),
        charts=_charts(jobs, colors),
        has_page={job.number for job in jobs if (job.folder / PAGE_NAME).is_file()},
    )
    return page


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
"""Figures for people, with heading and form; sweep.csv has all."""


def _heads(jobs: list[Job]) -> list[str]:
    return [*differing_keys(jobs), *(_FIGURES[name][0] for name in _measured(jobs)), "time"]


def _cells(job: Job, jobs: list[Job]) -> list[str]:
    """Under `_heads`; empty where there is no value."""
    figures = asdict(job.summary)
    shown = ["" if figures[name] is None else _FIGURES[name][1](figures[name]) for name in _measured(jobs)]
    seconds = job.record.seconds if job.record else None
    time = "" if seconds is None else duration(seconds)
    return [*(job.settings.get(key, "") for key in differing_keys(jobs)), *shown, time]


def _measured(jobs: list[Job]) -> list[str]:
    """Figures that at least one job has."""
    figures = [asdict(job.summary) for job in jobs]
    return [name for name in _FIGURES if any(one[name] is not None for one in figures)]


def _outcome(jobs: list[Job]) -> str:
    number = Counter(job.status for job in jobs)
    text = f"{plural(len(jobs), 'job')}: {', '.join(f'{n} {status}' for status, n in number.items())}."
    if best := best_job(jobs):
        setting = ", ".join(f"{key}={best.settings.get(key, '')}" for key in differing_keys(jobs))
        text += f" Best top-1 accuracy: {percent(best.summary.top1 or 0.0)} in job {best.number}"
        text += f" ({setting})." if setting else "."
    return text


def _charts(jobs: list[Job], colors: dict[int, str]) -> list[Chart]:
    # Jobs without a colour of their own lie behind and are not in the key.
    order = sorted(jobs, key=lambda job: colors[job.number] != FAINT)

    def lines(column: str) -> list[Line]:
        return [
            Line(f"job {job.number}", job.metrics[column], color, in_key=color != FAINT)
            for job in order
            for color in [colors[job.number]]
            if column in job.metrics
        ]

    from_zero = Scale(from_zero=True)
    charts = [
        line_chart("top1", "Validation top-1 accuracy", lines("val/top1"), Scale(percent=True)),
        line_chart("train-loss", "Training loss", lines("train/loss")),
        line_chart("val-loss", "Validation loss", lines("val/loss")),
        line_chart("rate", "Learning rate", lines("lr"), from_zero),
        line_chart("images", "Images per second", lines("fourmin/T"), from_zero),
        line_chart("efficiency", "Efficiency e", lines("fourmin/e"), Scale(percent=True, from_zero=True)),
    ]
    return [chart for chart in charts if chart is not None]


def _csv(jobs: list[Job]) -> str:
    """Every setting and figure, unrounded."""
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
    heads, shared = ["job", "status", *_heads(jobs)], shared_settings(jobs)
    rule = ["---", "---", *("---" if head in differing_keys(jobs) else "---:" for head in _heads(jobs))]
    rows = [[str(job.number), job.status, *_cells(job, jobs)] for job in jobs]
    lines = ["# Sweep", "", _escaped(_outcome(jobs)), ""]
    if shared:
        lines += [_escaped(f"The same in all jobs: {', '.join(shared)}."), ""]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in (heads, rule, *rows)]
    for job in jobs:
        if job.error:
            lines += ["", f"Job {job.number}, {job.status}:", ""]
            lines += [f"    {line}" for line in printable(job.error).splitlines()]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A text from outside as one line of a Markdown table."""
    return html.escape(" ".join(printable(text).split()), quote=False).replace("|", "\\|")
