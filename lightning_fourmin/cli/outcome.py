"""What a training says at its end."""

import os
import shlex
from pathlib import Path

from lightning_fourmin.report.run_page import PAGE_NAME
from lightning_fourmin.runs.record import ERROR_NAME, RunRecord, Summary
from lightning_fourmin.runs.resume import override, saved
from lightning_fourmin.text import plural


def closing_lines(record: RunRecord, folder: Path) -> list[str]:
    """How it went and where to read more, as lines for the terminal."""
    where = os.path.relpath(folder)
    if record.status in ("interrupted", "preempted"):
        last, how = "epoch that was complete", "interrupted"
        if record.status == "preempted":
            last, how = "step that was saved", "asked to end by SIGTERM"
        words = shlex.quote(override("resume", where))
        if record.overrides:
            start = next((text for text in record.overrides if text.startswith("resume=")), "resume=true")
            words = f"{shlex.quote(start)} {shlex.quote(override('hydra.sweep.dir', os.path.relpath(folder.parent)))}"
        going_on = f"`{words}` goes on after the last {last}"
        rest = going_on if saved(folder) or record.overrides else "nothing was saved yet"
        return [f"fourmin train: {how}; {rest}"]
    if record.status == "failed":
        details = [f"  traceback: {where}/{ERROR_NAME}"] if (folder / ERROR_NAME).is_file() else []
        return [f"fourmin train: {record.error}", *details]
    rows = [*_figures(record.summary), ("time", f"{record.seconds:,.0f} s"), ("report", f"{where}/{PAGE_NAME}")]
    return ["", *(f"  {name:12}{text}" for name, text in rows)]


def _figures(summary: Summary) -> list[tuple[str, str]]:
    accuracy = "no validation in this run"
    if summary.top1 is not None and summary.top5 is not None:
        accuracy = f"{summary.top1:.1%} top-1, {summary.top5:.1%} top-5"
    rows = [("accuracy", accuracy)]
    if summary.images_per_s is not None:
        factors = ""
        if summary.S is not None and summary.e is not None:
            factors = f" = S {summary.S:,.0f} x N {summary.N} x e {summary.e:.2f}"
        rows.append(("images/s", f"{summary.images_per_s:,.0f}{factors}"))
    if summary.steps is not None:
        skipped = "" if summary.skipped_steps is None else f", {summary.skipped_steps} skipped"
        rows.append(("steps", f"{summary.steps:,d} in {plural(summary.epochs or 0, 'epoch')}{skipped}"))
    return rows
