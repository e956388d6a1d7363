"""Nothing piles up in a run, nor from run to run: threads and open files. `make soak` does it for longer."""

from pathlib import Path

from tests.support.footprint import check_flat, long_fit, many_fits
from tests.support.pool import RankPool


def test_steps_leave_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    for taken in ranks.run(long_fit, tmp_path, 60, 30, nodes=(2, 2)):
        assert len(taken) == 4
        check_flat(taken[1], taken[-1])


def test_fits_leave_nothing_behind(ranks: RankPool) -> None:
    for taken in ranks.run(many_fits, 6, nodes=(2, 1)):
        check_flat(taken[1], taken[-1])
