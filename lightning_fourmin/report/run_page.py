"""`report.html` of a run: one page that needs nothing but itself."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fourmin.files import write_whole
from lightning_fourmin.report.heat_map import trust_ratio_map
from lightning_fourmin.report.sections import learning, precision, throughput
from lightning_fourmin.report.summary import headlines, summary_so_far
from lightning_fourmin.report.table_chart import algorithms_of, table_chart
from lightning_fourmin.runs.metrics import read_metrics, resumed_steps
from lightning_fourmin.runs.record import RunRecord
from lightning_fourmin.text import duration, grouped, moment, percent, plural, printable, readable_size, rounded, whole

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE_NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: Path) -> Path:
    """Writes the page of the run in `folder`, whatever state the run is in; gives its path."""
    record, metrics = RunRecord.read(folder), read_metrics(folder)
    summary = summary_so_far(record, metrics)
    config = folder / "config.yaml"
    page = folder / PAGE_NAME
    write_page(
        page,
        "run.html",
        record=record,
        summary=summary,
        headlines=headlines(record, summary),
        resumed=[f"{step:,}" for step in resumed_steps(metrics)],
        sections=(learning(metrics), precision(metrics, summary), throughput(metrics, record, summary)),
        heat_map=trust_ratio_map(metrics),
        algorithms=algorithms_of(record.table) if record.table else [],
        table_chart=table_chart(record.table) if record.table else None,
        config=config.read_text(errors="replace") if config.is_file() else None,
    )
    return page


def write_page(path: Path, template: str, **content: Any) -> None:
    text = _environment().get_template(template).render(**content)
    # Character references read the same in every encoding.
    write_whole(path, text.encode("ascii", "xmlcharrefreplace").decode())


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is a str of its own type: only texts that came from outside are cleaned.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    return environment


_FILTERS = (percent, whole, rounded, readable_size, duration, moment, plural, grouped)
