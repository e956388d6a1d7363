"""`sweep.svg`: the curves of all jobs, and where each ended."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fourmin.report.charts import Line, Scale, finish, plot_line, tick
from lightning_fourmin.report.svg import ALARM, FAINT, MUTED, SETTINGS, to_svg
from lightning_fourmin.runs.sweep import Job, differing_keys
from lightning_fourmin.text import percent, printable, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 960
CURVES_HEIGHT, ROW_HEIGHT = 220, 20


def sweep_picture(jobs: list[Job], colors: dict[int, str]) -> str:
    """The curves of accuracy and loss above, accuracy and speed of each job below; stands alone, light and dark."""
    import matplotlib
    from matplotlib.figure import Figure

    ends_height = ROW_HEIGHT * len(jobs) + 20
    height = CURVES_HEIGHT + ends_height + 130
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / 72, height / 72))

        def axes_at(left: int, top: int, width: int, tall: int) -> "Axes":
            return figure.add_axes((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))

        _curves(axes_at(56, 36, 396, CURVES_HEIGHT - 30), "Validation top-1 accuracy", "val/top1", jobs, colors)
        _curves(axes_at(540, 36, 396, CURVES_HEIGHT - 30), "Training loss", "train/loss", jobs, colors)
        top = CURVES_HEIGHT + 90
        accuracy, speed = axes_at(300, top, 270, ends_height), axes_at(640, top, 250, ends_height)
        _ends(accuracy, "Top-1 accuracy at the end", jobs, colors, lambda job: job.summary.top1, percent)
        _ends(speed, "Images per second", jobs, colors, lambda job: job.summary.images_per_s, whole)
        accuracy.set_yticks(range(len(jobs)), [_label(job, jobs) for job in jobs])
        speed.set_yticks(range(len(jobs)), ["" for _ in jobs])
        style = (Path(__file__).parent / "templates" / "theme.css").read_text() + "svg { background: var(--paper); }"
        return to_svg(figure, "sweep", f"Curves and results of {len(jobs)} jobs", style)


def _curves(axes: "Axes", title: str, column: str, jobs: list[Job], colors: dict[int, str]) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    # Jobs without a colour of their own lie behind.
    for job in sorted(jobs, key=lambda job: colors[job.number] != FAINT):
        if column in job.metrics and len(job.metrics[column].steps):
            plot_line(axes, Line("", job.metrics[column].smoothed(), colors[job.number]))
    finish(axes, Scale(percent=column == "val/top1"))


def _ends(
    axes: "Axes",
    title: str,
    jobs: list[Job],
    colors: dict[int, str],
    figure_of: Callable[[Job], float | None],
    form: Callable[[float], str],
) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    axes.set_title(title)
    axes.set_ylim(len(jobs) - 0.5, -0.5)
    for place, job in enumerate(jobs):
        value = figure_of(job)
        if value is None:
            text, color = (job.status, ALARM) if job.error else ("not measured", MUTED)
            axes.text(0.02, place, text, color=color, va="center", transform=axes.get_yaxis_transform())
        else:
            axes.plot([value], [place], "o", color=colors[job.number], ms=7, mew=0)
            axes.annotate(form(value), (value, place), (9, 0), textcoords="offset points", va="center")
    axes.margins(x=0.3)
    axes.grid(False)
    axes.xaxis.set_major_locator(MaxNLocator(4) if axes.lines else NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value) if form is percent else tick(value)))


def _label(job: Job, jobs: list[Job]) -> str:
    """The job in words that fit beside its row."""
    settings = " ".join(f"{key}={job.settings.get(key, '')}" for key in differing_keys(jobs))
    text = " ".join(printable(f"{job.number}  {settings}").split())
    return text if len(text) <= 42 else text[:40] + ".."
