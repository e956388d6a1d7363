"""What a sweep leaves behind: a table and a page of all its jobs."""

import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_fourmin.report.sweep_page import write_sweep
from lightning_fourmin.runs.sweep import read_jobs


class SweepReport(Callback):
    """Called by Hydra (`hydra.callbacks`) when the last job of a multirun has ended."""

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
            # Hydra catches errors in callbacks, but lets this through.
            sys.exit(1)
