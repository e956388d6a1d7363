"""`sweep.csv`, `sweep.md` and `report.html` of a sweep: all of its jobs side by side."""

import csv
import html
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from lightning_fourmin.files import write_whole
from lightning_fourmin.report.charts import Chart, Line, line_chart
from lightning_fourmin.report.run_page import PAGE_NAME, write_page
from lightning_fourmin.runs.record import Summary
from lightning_fourmin.runs.sweep import Job, best_job, differing_keys, read_jobs, shared_settings
from lightning_fourmin.svg import FAINT, SERIES, VARIABLES
from lightning_fourmin.text import duration, percent, plural, printable, rounded, whole

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
        num_colors=len(SERIES),
        heads=_heads(jobs),
        rows={job.number: _cells(job, jobs) for job in jobs},
        num_settings=len(differing_keys(jobs)),
        shared=shared_settings(jobs),
        charts=_charts(jobs, colors),
        has_page={job.number for job in jobs if (job.folder / PAGE_NAME).is_file()},
    )
    return page


def _job_colors(jobs: list[Job]) -> dict[int, str]:
    """A colour for each job; where there are more jobs than colours, the best jobs get one and the others are faint."""
    order = sorted(jobs, key=lambda job: -(job.summary.top1 or 0.0)) if len(jobs) > len(SERIES) else jobs
    colored = sorted(job.number for job in order[: len(SERIES)])
    return {job.number: FAINT for job in jobs} | dict(zip(colored, SERIES, strict=False))


def _heads(jobs: list[Job]) -> list[str]:
    """The headings after job and status: settings that differ, figures, time."""
    return [*differing_keys(jobs), *(_FIGURES[name][0] for name in _measured(jobs)), "time"]


def _cells(job: Job, jobs: list[Job]) -> list[str]:
    """A job's texts under `_heads`; an empty one where there is no value."""
    figures = asdict(job.summary)
    shown = ["" if figures[name] is None else _FIGURES[name][1](figures[name]) for name in _measured(jobs)]
    seconds = job.record.seconds if job.record else None
    time = "" if seconds is None else duration(seconds)
    return [*(job.settings.get(key, "") for key in differing_keys(jobs)), *shown, time]


def _measured(jobs: list[Job]) -> list[str]:
    """The figures that at least one job has."""
    figures = [asdict(job.summary) for job in jobs]
    return [name for name in _FIGURES if any(one[name] is not None for one in figures)]


def _outcome(jobs: list[Job]) -> str:
    """How the jobs ended and which is the best, as a sentence or two."""
    number = Counter(job.status for job in jobs)
    text = f"{plural(len(jobs), 'job')}: {', '.join(f'{n} {status}' for status, n in number.items())}."
    if best := best_job(jobs):
        setting = ", ".join(f"{key}={best.settings.get(key, '')}" for key in differing_keys(jobs))
        text += f" Best top-1 accuracy: {percent(best.summary.top1 or 0.0)} in job {best.number}"
        text += f" ({setting})." if setting else "."
    return text


def _charts(jobs: list[Job], colors: dict[int, str]) -> list[Chart]:
    # Faint jobs are drawn first, so that they lie behind, and are not in the key.
    order = sorted(jobs, key=lambda job: colors[job.number] != FAINT)

    def lines(column: str) -> list[Line]:
        return [
            Line(f"job {job.number}", job.metrics[column], color, in_key=color != FAINT)
            for job in order
            for color in [colors[job.number]]
            if column in job.metrics
        ]

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
