"""A long run and many runs in one process: threads, open files and memory stay what they are."""

from pathlib import Path

from tests.support.figures import figure
from tests.support.footprint import Footprint, check_flat, long_fit, many_fits
from tests.support.pool import RankPool

GROWTH_MB = 8.0
"""What the allocator may take more from the middle to the end; before that it settles, with plain DDP as well."""


def check_all(what: str, taken: list[Footprint]) -> None:
    print(*(f"{f.num_threads} threads, {f.num_files} files, {f.memory_mb:.1f} MB" for f in taken), sep="\n")
    first, last = taken[len(taken) // 2], taken[-1]
    for name, growth, unit in (
        ("memory", last.memory_mb - first.memory_mb, "MB"),
        ("threads", last.num_threads - first.num_threads, "more"),
        ("open files", last.num_files - first.num_files, "more"),
    ):
        figure(f"{what}, a rank from the middle to the end: {name}", growth, unit)
    check_flat(first, last)
    assert last.memory_mb - first.memory_mb < GROWTH_MB


def test_2000_steps_on_4_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for taken in ranks.run(long_fit, tmp_path, 2000, 200, nodes=(2, 2), timeout=1500):
        assert len(taken) == 20
        check_all("2000 steps on 4 ranks", taken)


def test_100_fits_in_one_process(ranks: RankPool) -> None:
    for taken in ranks.run(many_fits, 100, nodes=(2, 1), timeout=600):
        check_all("100 fits in one process, 3 ranks", taken)
