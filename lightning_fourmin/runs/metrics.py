"""The curves of a run, from the files that Lightning's CSVLogger writes, and the figures that they end with."""

import csv
import io
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fourmin.errors import RunError
from lightning_fourmin.runs.folder import RESUMED, metrics_files
from lightning_fourmin.runs.record import RunRecord, Summary

Array = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Series:
    """The values of one column in the order of their steps; those that are not finite are counted, not kept."""

    steps: Array
    values: Array
    num_bad: int = 0
    """How many values were not finite."""
    first_bad_step: int | None = None
    """The step of the first value that was not finite."""
    ends_bad: bool = False
    """Whether the last value was not finite."""

    @property
    def last(self) -> float:
        """The last finite value."""
        return float(self.values[-1])

    def at(self, steps: Array) -> "Series":
        """The values at those of `steps` that were logged."""
        places = np.isin(self.steps, steps)
        return Series(self.steps[places], self.values[places])

    def times(self, other: "Series") -> "Series":
        """The product at the steps that both have."""
        mine, theirs = self.at(other.steps), other.at(self.steps)
        return Series(mine.steps, mine.values * theirs.values)

    def thinned(self, num_bins: int = 250) -> "Series":
        """The least and the largest value of each of `num_bins` bins: a page stays small and no peak is lost."""
        if len(self.steps) <= 2 * num_bins:
            return self
        kept: set[int] = set()
        for places in np.array_split(np.arange(len(self.steps)), num_bins):
            kept |= {int(places[self.values[places].argmin()]), int(places[self.values[places].argmax()])}
        order = sorted(kept)
        return replace(self, steps=self.steps[order], values=self.values[order])


Metrics = dict[str, Series]
"""The logged values of a run by name."""
_Columns = dict[str, dict[int, float]]
"""Values by name and step."""


def read_metrics(folder: Path) -> Metrics:
    """Every column with at least one number, by name; none if nothing was logged.

    A run that was resumed has a file for each time it was started. A file counts up to the step from which the
    next one resumed, because the steps after it were done again. A start that did not resume makes a new run.
    """
    columns: _Columns = {}
    for path in metrics_files(folder):
        later = _read(path)
        columns = _joined(columns, later) if RESUMED in later else later
    series = {name: _series(points) for name, points in columns.items()}
    return {name: one for name, one in series.items() if len(one.steps) or one.num_bad}


def resumed_steps(metrics: Metrics) -> list[int]:
    """The steps at which the run was resumed from a checkpoint."""
    return [int(step) for step in metrics[RESUMED].steps] if RESUMED in metrics else []


def summary_so_far(record: RunRecord, metrics: Metrics) -> Summary:
    """The summary in the record; figures that it lacks, as in a run that did not end, come from the metrics."""
    logged = {name: series for name, series in metrics.items() if len(series.steps)}
    found: dict[str, Any] = {
        field: logged[name].last for field, name in _LAST.items() if name in logged and not logged[name].ends_bad
    }
    # Speed is taken since the last resume: before it, the run may have had another number of ranks.
    start = max(resumed_steps(metrics), default=0)
    for field, name in _MEDIAN.items():
        if name in logged and len(since := logged[name].values[logged[name].steps >= start]):
            found[field] = float(np.median(since))
    if "e" in found and "step_ms" in found:
        # Medians of each by itself would not agree.
        found["exposed_ms"] = (1 - found["e"]) * found["step_ms"]
    found |= {field: int(found[field]) for field in ("N", "skipped_steps") if field in found}
    known = {field: value for field, value in asdict(record.summary).items() if value is not None}
    return replace(Summary(**found), **known)


_LAST = {
    "top1": "val/top1",
    "top5": "val/top5",
    "val_loss": "val/loss",
    "skipped_steps": "fourmin/skipped_steps",
    "loss_scale": "fourmin/loss_scale",
}
"""Fields of a summary that are the last value of a metric."""
_MEDIAN = {
    "images_per_s": "fourmin/T",
    "S": "fourmin/S",
    "N": "fourmin/N",
    "e": "fourmin/e",
    "e_low": "fourmin/e_low",
    "e_high": "fourmin/e_high",
    "step_ms": "fourmin/step_ms",
    "exposed_ms": "fourmin/exposed_ms",
}
"""Fields of a summary that are the median of a metric."""


def _read(path: Path) -> _Columns:
    """The columns of one file, without that of the steps."""
    text = path.read_text()
    # A run that is still going may be writing its last line, and half a number is a wrong number.
    rows = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))
    names = next(rows, [])
    if names and "step" not in names:
        raise RunError(f"{path} has no column step: Lightning's CSVLogger did not write it")
    columns: _Columns = defaultdict(dict)
    for number, row in enumerate(rows, start=2):
        cells = {name: cell for name, cell in zip(names, row, strict=False) if cell}
        name = "step"
        try:
            step = int(cells.pop(name))
            for name, cell in cells.items():
                columns[name][step] = float(cell)
        except (KeyError, ValueError) as error:
            raise RunError(f"{path}, line {number}: column {name} holds no number ({error})") from error
    return columns


def _joined(earlier: _Columns, later: _Columns) -> _Columns:
    """Drops the earlier values after the step from which the run was resumed: the later file has those steps again."""
    start = min(later[RESUMED])
    kept = {name: {step: value for step, value in points.items() if step <= start} for name, points in earlier.items()}
    return {name: kept.get(name, {}) | later.get(name, {}) for name in [*kept, *later]}


def _series(points: dict[int, float]) -> Series:
    """The values of a column in the order of their steps."""
    good = sorted((step, value) for step, value in points.items() if math.isfinite(value))
    bad = [step for step, value in points.items() if not math.isfinite(value)]
    table = np.array(good, dtype=np.float64).reshape(-1, 2)
    return Series(table[:, 0], table[:, 1], len(bad), min(bad, default=None), max(points, default=None) in bad)
