"""What the process of `fourmin train` prints: the outcome of a run, and the table of a sweep."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_fourmin.report.run_page import PAGE_NAME
from lightning_fourmin.report.sweep_page import write_sweep
from lightning_fourmin.runs.folder import override as hydra_override
from lightning_fourmin.runs.folder import saved
from lightning_fourmin.runs.record import ERROR_NAME, RunRecord, Summary
from lightning_fourmin.runs.sweep import read_jobs
from lightning_fourmin.text import plural


def outcome_lines(record: RunRecord, folder: Path) -> list[str]:
    """How a run went and where to read more, as lines for the terminal."""
    where = os.path.relpath(folder)
    if record.status in ("interrupted", "preempted"):
        last, how = "epoch that was complete", "interrupted"
        if record.status == "preempted":
            last, how = "step that was saved", "asked to end by SIGTERM"
        # A job resumes with its sweep: the folder of the sweep names the jobs that are left.
        place = ("hydra.sweep.dir", os.path.relpath(folder.parent)) if record.overrides else ("run_dir", where)
        without = " without resume=false and" if "resume=false" in record.command.lower() else ""
        how_to = f"the same command{without} with `{shlex.quote(hydra_override(*place))}` goes on after the last {last}"
        rest = how_to if saved(folder) or record.overrides else "nothing was saved yet"
        return [f"fourmin train: {how}; {rest}"]
    if record.status == "failed":
        details = [f"  traceback: {where}/{ERROR_NAME}"] if (folder / ERROR_NAME).is_file() else []
        return [f"fourmin train: {record.error}", *details]
    rows = [*_figures(record.summary), ("time", f"{record.seconds:,.0f} s"), ("report", f"{where}/{PAGE_NAME}")]
    return ["", *(f"  {name:12}{text}" for name, text in rows)]


def _figures(summary: Summary) -> list[tuple[str, str]]:
    shares = {"top-1": summary.top1, "top-5": summary.top5}
    found = [f"{value:.1%} {name}" for name, value in shares.items() if value is not None]
    if not found and summary.val_loss is not None:
        found = [f"validation loss {summary.val_loss:.4g}"]
    rows = [("accuracy", ", ".join(found) or "no validation in this run")]
    if summary.images_per_s is not None:
        factors = ""
        if summary.S is not None and summary.e is not None:
            factors = f" = S {summary.S:,.0f} x N {summary.N} x e {summary.e:.2f}"
        rows.append(("images/s", f"{summary.images_per_s:,.0f}{factors}"))
    if summary.steps is not None:
        skipped = "" if summary.skipped_steps is None else f", {summary.skipped_steps} skipped"
        rows.append(("steps", f"{summary.steps:,d} in {plural(summary.epochs or 0, 'epoch')}{skipped}"))
    return rows


class SweepReport(Callback):
    """Hydra's callback that writes page and table of a sweep when its last job has ended (`hydra.callbacks`)."""

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            page = write_sweep(folder)
            jobs = read_jobs(folder)
        except Exception as error:
            print(f"fourmin train: {folder} has no page, its jobs are in its folders: {error}", file=sys.stderr)
            sys.exit(1)
        print(f"\n{(folder / 'sweep.md').read_text()}\n{os.path.relpath(page)}", flush=True)
        if failed := [job for job in jobs if job.status != "done"]:
            lines = [f"  job {job.number}: {job.error or job.status}" for job in failed]
            print(f"fourmin train: {len(failed)} of {len(jobs)} jobs failed:", *lines, sep="\n", file=sys.stderr)
            # Hydra catches the errors of callbacks; SystemExit is none.
            sys.exit(1)
