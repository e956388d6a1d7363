"""`fourmin report`: writes the page of a run, or of a sweep and all its jobs; merges the traces of ranks."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_fourmin.allreduce.measure import merge_traces
from lightning_fourmin.cli.hydra_app import run
from lightning_fourmin.errors import RunError
from lightning_fourmin.report.run_page import write_report
from lightning_fourmin.report.sweep_page import write_sweep
from lightning_fourmin.runs.record import RUN_NAME
from lightning_fourmin.runs.sweep import is_sweep, read_jobs


@dataclass(frozen=True)
class ReportOptions:
    """The fields of conf/report.yaml."""

    run: Path
    """The folder of a run or of a sweep."""


def main() -> None:
    """Runs the verb."""
    run("report", ReportOptions, _report)


def _report(options: ReportOptions) -> None:
    if is_sweep(options.run):
        for job in read_jobs(options.run):
            # The page of the sweep names what cannot be read.
            with suppress(RunError):
                write_report(job.folder)
        print(write_sweep(options.run))
    elif not (options.run / RUN_NAME).exists() and (trace := merge_traces(options.run)):
        # The folder of a Trainer that was not started by `fourmin train` may have a trace, but no record.
        print(trace)
    else:
        print(write_report(options.run))
