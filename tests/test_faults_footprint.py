"""Nothing piles up in a run, nor from run to run: threads and open files. `make soak` does it for longer."""

from pathlib import Path

from footprint import grows, long_fit, many_fits
from pool import RankPool


def test_steps_leave_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    for taken in ranks.run(long_fit, tmp_path, 60, 20, nodes=(2, 2)):
        assert len(taken) == 6
        threads, files, _ = zip(*taken, strict=True)
        assert not grows(threads), taken
        assert not grows(files), taken


def test_fits_leave_nothing_behind(ranks: RankPool) -> None:
    for taken in ranks.run(many_fits, 4, nodes=(2, 1)):
        threads, files, _ = zip(*taken, strict=True)
        assert not grows(threads), taken
        assert not grows(files), taken
