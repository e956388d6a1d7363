"""Nothing piles up in a run, nor from run to run: threads and open files. `make soak` does it for longer."""

import gc
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.support.footprint import check_flat, long_fit, many_fits
from tests.support.parity import Net, images
from tests.support.pool import RankPool
from tests.support.training import rank_trainer


def test_steps_leave_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    for taken in ranks.run(long_fit, tmp_path, 60, 30, nodes=(2, 2)):
        assert len(taken) == 4
        check_flat(taken[1], taken[-1])


def test_fits_leave_nothing_behind(ranks: RankPool) -> None:
    for taken in ranks.run(many_fits, 6, nodes=(2, 1)):
        check_flat(taken[1], taken[-1])


def what_a_fit_leaves() -> tuple[set[str], list[str], list[str]]:
    """Environment variables that a fit has changed; threads of ours, and files that a further fit has left open."""
    environment = dict(os.environ)
    fit()
    files = open_files()
    fit()
    gc.collect()
    changed = {name for name, value in os.environ.items() if environment.get(name) != value}
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("fourmin")]
    return changed, threads, sorted((open_files() - files).elements())


def fit() -> None:
    rank_trainer("fourmin", max_steps=2).fit(Net(), images(2))


def open_files() -> Counter[str]:
    """The kinds of files that this process has open: sockets, pipes, memory, and others by their paths."""
    gc.collect()
    kinds: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        # The one that lists them is closed by now.
        with suppress(FileNotFoundError):
            kinds[os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]] += 1
    return kinds


def test_a_fit_leaves_no_variable_thread_or_file(ranks: RankPool) -> None:
    assert ranks.run(what_a_fit_leaves, nodes=(2, 1)) == [(set(), [], [])] * 3
