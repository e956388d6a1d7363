"""The runs behind the large-batch table: taken over from sweeps as small files, and read back."""

import csv
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_fourmin.runs.metrics import read_metrics
from lightning_fourmin.runs.record import Hardware, RunRecord
from lightning_fourmin.runs.sweep import read_jobs

RUNS = Path(__file__).parent / "large_batch" / "runs"
KEPT_CONFIG = ("name", "seed", "global_batch", "model", "data", "optim", "schedule", "precision", "strategy", "trainer")
KEPT_METRICS = ("val/top1", "val/loss")


def keep(sweep: Path, runs: Path) -> int:
    """Writes record, config and the figures of each validation of the sweep's finished jobs; gives their number."""
    done = [job for job in read_jobs(sweep) if job.record is not None and job.record.status == "done"]
    for job in done:
        assert job.record is not None
        config = OmegaConf.to_container(OmegaConf.load(job.folder / "config.yaml"))
        assert isinstance(config, dict)
        kept = {key: config[key] for key in KEPT_CONFIG}
        kept["data"]["path"] = Path(kept["data"]["path"]).name
        folder = runs / job.record.name / f"seed{config['seed']}"
        folder.mkdir(parents=True, exist_ok=True)
        replace(job.record, fusion_plan=None, table=None).write(folder)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(kept)))
        _thin(job.folder, folder)
    return len(done)


def _thin(job: Path, folder: Path) -> None:
    """A line a validation; the training loss is the mean of what was logged since the one before."""
    metrics = read_metrics(job)
    losses = metrics.get("train/loss")
    before = -1.0
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "train/loss", *KEPT_METRICS])
        for step in metrics["val/top1"].steps:
            since = [] if losses is None else losses.values[(losses.steps > before) & (losses.steps <= step)].tolist()
            loss = f"{statistics.fmean(since):.6g}" if since else ""
            values = [metrics[name].at(step).values for name in KEPT_METRICS if name in metrics]
            writer.writerow([int(step), loss, *(f"{value[0]:.6g}" if len(value) else "" for value in values)])
            before = step


@dataclass(frozen=True)
class Row:
    """The runs of one experiment, a seed each."""

    top1: tuple[float, ...]
    """In percent, after the last epoch."""
    seeds: tuple[int, ...]
    batch: int
    steps: int
    epochs: int
    image_size: int
    """In pixels."""
    rate: float
    """The peak, after linear scaling."""
    skipped: tuple[int, ...]
    """Steps that the loss scale skipped."""
    images_per_s: float
    seconds: float
    """Of all its runs."""
    hardware: tuple[Hardware, ...]
    """Of each run."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.top1)

    @property
    def std(self) -> float | None:
        """None: one seed has none."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


def read_rows(runs: Path) -> dict[str, Row]:
    """By name of the experiment."""
    return {folder.name: _read_row(folder) for folder in sorted(runs.glob("*/"))}


def _read_row(folder: Path) -> Row:
    paths = sorted(folder.glob("seed*/"), key=lambda path: int(path.name.removeprefix("seed")))
    records = [RunRecord.read(path) for path in paths]
    configs: list[Any] = [OmegaConf.load(path / "config.yaml") for path in paths]
    summaries = [record.summary for record in records]
    lengths = {(one.epochs, one.steps, config.global_batch) for one, config in zip(summaries, configs, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"{folder}: its runs differ in epochs, steps or batch: {sorted(lengths)}")
    config, first = configs[0], summaries[0]
    base_batch = config.schedule.base_batch or config.global_batch
    return Row(
        top1=tuple(100 * _known(one.top1) for one in summaries),
        seeds=tuple(int(config.seed) for config in configs),
        batch=int(config.global_batch),
        steps=int(_known(first.steps)),
        epochs=int(_known(first.epochs)),
        image_size=int(config.data.image_size),
        rate=float(config.optim.lr) * config.global_batch / base_batch,
        skipped=tuple(one.skipped_steps or 0 for one in summaries),
        images_per_s=statistics.median(_known(one.images_per_s) for one in summaries),
        seconds=sum(_known(record.seconds) for record in records),
        hardware=tuple(record.hardware for record in records),
    )


def _known(value: float | None) -> float:
    if value is None:
        raise ValueError("a finished run without accuracy, steps or speed: was it run without validation?")
    return value
