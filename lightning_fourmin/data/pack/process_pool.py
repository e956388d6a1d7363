"""A pool of processes with a progress bar, for work on many shards.

    main process                       worker processes
    run_tasks: submits the tasks   ->  work(task), which calls count_one() for each sample that is done
    shows the counter in a bar     <-  one counter in shared memory, which all of them increase
    yields each result as it comes <-  what work(task) returned, pickled

Workers are forked where that is the default of Python (Linux up to 3.13). Otherwise they are new processes, which
import what they need. A worker ends with the main process, even if that is killed.
"""

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
"""Seconds between two looks at the counter."""
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_num_done: "Synchronized[int] | None" = None
"""In a worker process: the counter that it shares with the others. In the main process: None."""


def count_one() -> None:
    """Called in a worker: counts one sample as done. Outside of a pool it does nothing."""
    if _num_done is not None:
        with _num_done.get_lock():
            _num_done.value += 1


class _Rate(ProgressColumn):
    @override
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f}/s")


def _start_worker(num_done: "Synchronized[int]") -> None:
    """The first thing that a worker process runs."""
    global _num_done
    _num_done = num_done
    # Ctrl-C reaches workers as well: they end at once, and the main process says what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def run_tasks(
    work: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    *,
    num_workers: int | None,
    label: str,
    num_samples: int | None,
) -> Iterator[tuple[_Task, _Result]]:
    """Calls `work` for each task in a pool of processes, and yields each task with its result as soon as it is there.

    Args:
        work: a function at the top of a module; tasks and results are pickled.
        tasks: what `work` is called with, each in one call.
        num_workers: the number of processes; None: as many as there are cores.
        label: what stands before the progress bar.
        num_samples: the number of calls of `count_one` that make the bar full; None: not known.
    """
    if not tasks:
        return
    # SLURM and containers may give this job only some of the machine's cores; macOS does not tell which.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_done = multiprocessing.Value("q", 0)
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    pool = ProcessPoolExecutor(
        min(num_workers or num_cores, len(tasks)), initializer=_start_worker, initargs=(num_done,)
    )
    try:
        # Submitting starts the workers. The progress bar comes later, as it starts a thread, and a process should be
        # forked while it has none.
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
