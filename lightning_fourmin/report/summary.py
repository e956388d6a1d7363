"""The figures that a page begins with."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_fourmin.runs.metrics import Metrics, resumed_steps
from lightning_fourmin.runs.record import RunRecord, Summary
from lightning_fourmin.text import percent, plural, rounded, whole


@dataclass(frozen=True)
class Headline:
    name: str
    value: str | None
    """None: not measured."""
    about: str


def summary_so_far(record: RunRecord, metrics: Metrics) -> Summary:
    """The summary, with what a run that did not end has logged in place of what is missing."""
    there = {name: series for name, series in metrics.items() if len(series.steps)}
    logged: dict[str, Any] = {
        field: there[name].last for field, name in _LAST.items() if name in there and not there[name].ends_bad
    }
    # Speed is that of the last part: the others may have had other ranks.
    start = max(resumed_steps(metrics), default=0)
    last_part = {name: part for name, series in there.items() if len((part := series.since(start)).steps)}
    logged |= {field: last_part[name].median for field, name in _MEDIAN.items() if name in last_part}
    logged |= {field: int(logged[field]) for field in ("N", "skipped_steps") if field in logged}
    known = {field: value for field, value in asdict(record.summary).items() if value is not None}
    return replace(Summary(**logged), **known)


_LAST = {
    "top1": "val/top1",
    "top5": "val/top5",
    "val_loss": "val/loss",
    "skipped_steps": "fourmin/skipped_steps",
    "loss_scale": "fourmin/loss_scale",
}
_MEDIAN = {
    "images_per_s": "fourmin/T",
    "S": "fourmin/S",
    "N": "fourmin/N",
    "e": "fourmin/e",
    "step_ms": "fourmin/step_ms",
    "exposed_ms": "fourmin/exposed_ms",
}


def headlines(record: RunRecord, summary: Summary) -> list[Headline]:
    s = summary
    accuracy = [f"top-5 {percent(s.top5)}"] if s.top5 is not None else []
    accuracy += [f"loss {rounded(s.val_loss)}"] if s.val_loss is not None else []
    length = [plural(s.epochs, "epoch")] if s.epochs is not None else []
    length += [plural(s.steps, "step")] if s.steps is not None else []
    scale = "no loss scale" if s.loss_scale is None else f"loss scale {whole(s.loss_scale)}"
    ranks = s.N or record.world_size
    return [
        Headline("Top-1 accuracy", _shown(s.top1, percent), ", ".join([*accuracy, *length])),
        Headline("Images per second", _shown(s.images_per_s, whole), "T, all ranks together"),
        Headline("S", _shown(s.S, whole), "images/s of one rank without waits"),
        Headline("N", _shown(ranks, whole), "ranks"),
        Headline("e", _shown(s.e, percent), "scaling efficiency"),
        Headline("Skipped steps", _shown(s.skipped_steps, whole), scale),
    ]


def _shown(value: float | None, form: Callable[[float], str]) -> str | None:
    return None if value is None else form(value)
