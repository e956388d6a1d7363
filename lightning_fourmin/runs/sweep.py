"""The jobs of a sweep, each with its run folder, whether or not it got as far as a record."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_fourmin.errors import RunError
from lightning_fourmin.runs.metrics import Metrics, read_metrics, summary_so_far
from lightning_fourmin.runs.record import RUN_NAME, RunRecord, Summary


@dataclass(frozen=True)
class Job:
    """One job as the page of its sweep shows it."""

    number: int
    folder: Path
    record: RunRecord | None
    """None where the job left no record that can be read."""
    summary: Summary
    metrics: Metrics
    error: str | None

    @property
    def status(self) -> str:
        """The status in its record."""
        return "no record" if self.record is None else self.record.status

    @property
    def settings(self) -> dict[str, str]:
        """The overrides of the job by key."""
        overrides = self.record.overrides if self.record else ()
        return {key: value for key, _, value in (override.partition("=") for override in overrides)}


def is_sweep(folder: Path) -> bool:
    """Whether a folder has runs in numbered folders and is not itself a run."""
    return not (folder / RUN_NAME).is_file() and any((job / RUN_NAME).is_file() for job in _numbered(folder))


def read_jobs(folder: Path) -> list[Job]:
    """The jobs by number, with those whose files cannot be read; the error of such a job is the reason."""
    if not is_sweep(folder):
        raise RunError(f"{folder} is not the folder of a sweep: it has no numbered folder with a {RUN_NAME}")
    return [_read_job(job) for job in sorted(_numbered(folder), key=lambda job: int(job.name))]


def best_job(jobs: Iterable[Job]) -> Job | None:
    """The job with the highest top-1 accuracy, of several the first; None if no job has one."""
    measured = [job for job in jobs if job.summary.top1 is not None]
    return max(measured, key=lambda job: job.summary.top1 or 0.0, default=None)


def differing_keys(jobs: list[Job]) -> list[str]:
    """The keys of the settings that are not the same in all jobs that have a record."""
    settings = [job.settings for job in jobs if job.record]
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({one.get(key) for one in settings}) > 1]


def shared_settings(jobs: list[Job]) -> list[str]:
    """The settings that all jobs have, as `key=value`."""
    differing = differing_keys(jobs)
    settings = {key: value for job in jobs for key, value in job.settings.items() if key not in differing}
    return [f"{key}={value}" for key, value in settings.items()]


def _numbered(folder: Path) -> list[Path]:
    """The folders in `folder`, which may not exist, that have a number as their name."""
    return [path for path in folder.glob("*/") if path.name.isascii() and path.name.isdigit()]


def _read_job(folder: Path) -> Job:
    """The job whose run is in `folder`, as far as its files can be read."""
    record = None
    try:
        record = RunRecord.read(folder)
        metrics = read_metrics(folder)
        return Job(int(folder.name), folder, record, summary_so_far(record, metrics), metrics, record.error)
    except RunError as error:
        return Job(int(folder.name), folder, record, record.summary if record else Summary(), {}, str(error))
