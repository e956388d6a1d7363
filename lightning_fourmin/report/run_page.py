"""`report.html` of a run: one page without scripts that needs no other file."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fourmin.allreduce.measure import merge_traces
from lightning_fourmin.files import write_whole
from lightning_fourmin.report.charts import table_chart
from lightning_fourmin.report.heat_map import trust_ratio_map
from lightning_fourmin.report.sections import learning, precision, throughput
from lightning_fourmin.runs.metrics import read_metrics, resumed_steps, summary_so_far
from lightning_fourmin.runs.record import RunRecord, Summary
from lightning_fourmin.svg import THEME
from lightning_fourmin.text import duration, grouped, moment, percent, plural, printable, readable_size, rounded, whole
from lightning_fourmin.tune.plot import algorithms_in

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE_NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"
FILTERS = (duration, grouped, moment, percent, plural, readable_size, rounded, whole)
"""The text helpers that templates use, under their names."""


def write_report(folder: Path) -> Path:
    """Writes the page of the run in `folder`, whatever state the run is in, and returns the path of the page."""
    record, metrics = RunRecord.read(folder), read_metrics(folder)
    summary = summary_so_far(record, metrics)
    config = folder / "config.yaml"
    page = folder / PAGE_NAME
    trace = merge_traces(folder)
    write_page(
        page,
        "run.html",
        record=record,
        summary=summary,
        key_figures=key_figures(record, summary),
        resumed=[f"{step:,}" for step in resumed_steps(metrics)],
        sections=[
            section
            for section in (learning(metrics), precision(metrics, summary), throughput(metrics, record, summary))
            if section is not None
        ],
        heat_map=trust_ratio_map(metrics),
        algorithms=algorithms_in(row.milliseconds for row in record.table.rows) if record.table else [],
        table_chart=table_chart(record.table) if record.table else None,
        trace=None if trace is None else trace.name,
        config=config.read_text(errors="replace") if config.is_file() else None,
    )
    return page


def key_figures(record: RunRecord, summary: Summary) -> list[tuple[str, str | None, str]]:
    """The large numbers at the top of a page: name, value, and a text below; the value is None if nothing measured it.

    They are accuracy, throughput and its three factors, and skipped steps.
    """
    s = summary
    accuracy = [f"top-5 {percent(s.top5)}"] if s.top5 is not None else []
    accuracy += [f"loss {rounded(s.val_loss)}"] if s.val_loss is not None else []
    length = [plural(s.epochs, "epoch")] if s.epochs is not None else []
    length += [plural(s.steps, "step")] if s.steps is not None else []
    scale = "no loss scale" if s.loss_scale is None else f"loss scale {whole(s.loss_scale)}"

    def shown(value: float | None, form: Callable[[float], str]) -> str | None:
        return None if value is None else form(value)

    return [
        ("Top-1 accuracy", shown(s.top1, percent), ", ".join([*accuracy, *length])),
        ("Images per second", shown(s.images_per_s, whole), "T, all ranks together"),
        ("S", shown(s.S, whole), "images/s of one rank without waits"),
        ("N", shown(s.N or record.world_size, whole), "ranks"),
        ("e", shown(s.e, percent), "scaling efficiency"),
        ("Skipped steps", shown(s.skipped_steps, whole), scale),
    ]


def write_page(path: Path, template: str, **content: Any) -> None:
    """Writes a page from one of TEMPLATES; every text in `content` is escaped."""
    html = _environment().get_template(template).render(**content)
    # Character references read the same in every encoding.
    write_whole(path, html.encode("ascii", "xmlcharrefreplace").decode())


@cache
def _environment() -> "Environment":
    """What renders TEMPLATES: it escapes every text, and a name that a template has wrong is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup, a subclass of str, was made here. Only texts from outside can hold control characters.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.globals["theme"] = THEME
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment
