"""`fourmin report`: the page of a run, or of a sweep and all its jobs."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.errors import RunError
from lightning_fourmin.report.run_page import write_report
from lightning_fourmin.report.sweep_page import write_sweep
from lightning_fourmin.runs.sweep import is_sweep, read_jobs


@dataclass(frozen=True)
class ReportOptions:
    run: Path
    """Folder of a run, or of a sweep."""


def main() -> None:
    run("report", ReportOptions, _report)


def _report(options: ReportOptions) -> None:
    if is_sweep(options.run):
        for job in read_jobs(options.run):
            # What cannot be read is told on the page of the sweep.
            with suppress(RunError):
                write_report(job.folder)
        print(write_sweep(options.run))
    else:
        print(write_report(options.run))
