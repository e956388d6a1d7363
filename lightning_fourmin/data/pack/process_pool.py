"""A pool of processes with a progress bar, for work on many shards."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import Synchronized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from typing_extensions import override

from lightning_fourmin.data.worker_process import end_with_parent

REFRESH_S = 0.2
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_num_done: "Synchronized[int] | None" = None


def count_one() -> None:
    """Tells the progress bar that a sample is done."""
    if _num_done is not None:
        with _num_done.get_lock():
            _num_done.value += 1


class _Rate(ProgressColumn):
    @override
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f}/s")


def _start_worker(num_done: "Synchronized[int]") -> None:
    global _num_done
    _num_done = num_done
    # Ctrl-C reaches workers as well: they end, and the parent says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def _num_cores() -> int:
    """Of this job, where the system tells: SLURM and containers give it some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(
    work: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    *,
    num_workers: int | None,
    label: str,
    num_samples: int | None,
) -> Iterator[tuple[_Task, _Result]]:
    """Calls `work` for each task in a pool; gives the results as they come, and shows how many samples are done."""
    if not tasks:
        return
    num_done = multiprocessing.Value("q", 0)
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    pool = ProcessPoolExecutor(
        min(num_workers or _num_cores(), len(tasks)), initializer=_start_worker, initargs=(num_done,)
    )
    try:
        # Before the progress bar: it has a thread, and processes are better forked without.
        futures = {pool.submit(work, task): task for task in tasks}
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(label, total=num_samples)
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=REFRESH_S, return_when=FIRST_COMPLETED)
                progress.update(bar, completed=num_done.value)
                for future in done:
                    yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
