"""A long run and many runs in one process: threads, open files and memory stay what they are."""

from pathlib import Path

from footprint import Footprint, check_flat, long_fit, many_fits
from pool import RankPool

GROWTH_MB = 8.0
"""What the allocator may take more from the first quarter to the end."""


def check_all(taken: list[Footprint]) -> None:
    print(*(f"{f.num_threads} threads, {f.num_files} files, {f.memory_mb:.1f} MB" for f in taken), sep="\n")
    settled = taken[len(taken) // 4 :]
    check_flat(settled[0], settled[-1])
    assert settled[-1].memory_mb - settled[0].memory_mb < GROWTH_MB


def test_2000_steps_on_4_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for taken in ranks.run(long_fit, tmp_path, 2000, 200, nodes=(2, 2), timeout=1500):
        assert len(taken) == 20
        check_all(taken)


def test_50_fits_in_one_process(ranks: RankPool) -> None:
    for taken in ranks.run(many_fits, 50, nodes=(2, 1), timeout=600):
        check_all(taken)
