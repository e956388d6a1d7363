"""A rank that is killed: the others end soon, with an error that names it; nothing is left behind."""

import gc
import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from lightning_fourmin import FourMinStrategy
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.faults.missing_ranks import MissingRanks, Wait
from tests.support.dying import KILLED, Death, fit_until_a_rank_dies
from tests.support.parity import Net, images
from tests.support.pool import RankFailure, RankPool
from tests.support.ranks import current_case
from tests.support.training import rank_trainer


def shared_memory() -> set[str]:
    # Semaphores belong to process pools, also those of tests that run at the same time.
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


@pytest.mark.parametrize(("nodes", "seed"), [((2,), 1), ((1, 1), 2), ((2, 2), 3)])
def test_survivors_name_the_rank_that_was_killed(
    ranks: RankPool, tmp_path: Path, nodes: tuple[int, ...], seed: int
) -> None:
    check_survivors(ranks, tmp_path, nodes, seed)


def check_survivors(ranks: RankPool, folder: Path, nodes: tuple[int, ...], seed: int) -> float:
    """Seconds from the kill until the last of them knew."""
    world, before = sum(nodes), shared_memory()
    victim = Death.draw(seed, world).rank
    with pytest.raises(RankFailure) as caught:
        ranks.run(fit_until_a_rank_dies, seed, folder, nodes=nodes, timeout=60)
    ended = dict(re.findall(r"^rank (\d) died with exit code (-?\d+)", str(caught.value), re.MULTILINE))
    assert ended == {str(rank): "-9" if rank == victim else "1" for rank in range(world)}, caught.value
    survivors = [folder / f"rank{rank}.txt" for rank in range(world) if rank != victim]
    for path in survivors:
        error = path.read_text()
        assert re.match(rf"\w+: rank {victim} is gone: killed, stopped, or on a machine that does not answer", error)
    assert shared_memory() <= before
    return max(path.stat().st_mtime for path in survivors) - (folder / KILLED).stat().st_mtime


class Faulty(Net):
    def on_train_batch_end(self, *args: object) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 2:
            raise ValueError("a bug of the user")


def fit_with_a_bug(folder: Path) -> None:
    """Ends the process, as an error of a script would: that wakes ranks that wait for this one."""
    try:
        rank_trainer(FourMinStrategy(), max_epochs=1).fit(Faulty(), images(100))
    except Exception as error:
        (folder / f"rank{current_case().rank}.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def test_survivors_say_what_went_wrong_on_another_rank(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        ranks.run(fit_with_a_bug, tmp_path, nodes=(2, 1))
    texts = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(3)]
    assert texts[1] == "ValueError: a bug of the user"
    for text in (texts[0], texts[2]):
        assert "Error: rank 1 failed: ValueError: a bug of the user; resume from the last checkpoint" in text


class Pruned(Exception):
    """What all ranks raise, one after the other."""


class PrunedLate(Net):
    def on_after_backward(self) -> None:
        time.sleep(0.3 * self.global_rank)
        raise Pruned("not worth going on")


def fit_and_prune(num_fits: int) -> tuple[list[str], int]:
    """The errors, and how many threads there are more than after the first fit."""
    errors, num_threads = [], []
    for _ in range(num_fits):
        try:
            rank_trainer(FourMinStrategy(), max_epochs=1).fit(PrunedLate(), images(2))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        # As a driver of trials does; the Trainer of a fit that failed holds on to much.
        gc.collect()
        num_threads.append(len(os.listdir("/proc/self/task")))
    return errors, num_threads[-1] - num_threads[0]


def test_an_error_of_all_ranks_stays_their_own_and_leaves_nothing(ranks: RankPool) -> None:
    for errors, num_more in ranks.run(fit_and_prune, 4, world=2):
        assert errors == ["Pruned: not worth going on"] * 4
        assert num_more <= 0


class Hears:
    """Waits for nothing, and keeps what it is told."""

    def __init__(self) -> None:
        self.errors: SimpleQueue[str] = SimpleQueue()

    def waits(self) -> list[Wait]:
        return []

    def fail(self, error: LostRankError) -> None:
        self.errors.put(str(error))


def fail_because_of_data() -> str:
    """What the others hear when rank 1 cannot reach its data, and which ranks have heard when it leaves."""
    hears, text = Hears(), ""
    with closing(MissingRanks()) as missing_ranks:
        missing_ranks.watch(hears)
        dist.barrier()
        if current_case().rank == 1:
            missing_ranks.explain(OSError("http://host/train-000.tar: Connection refused"))
            text = " ".join(heard for (heard,) in missing_ranks._board.columns("heard"))
        else:
            text = hears.errors.get(timeout=20)
        dist.barrier()
    return text


def test_a_connection_of_the_data_is_the_ranks_own_fault(ranks: RankPool) -> None:
    answers = ranks.run(fail_because_of_data, world=3)
    assert answers.pop(1) == "yes yes yes", "the store may leave with a rank that fails"
    for heard in answers:
        assert heard.startswith("rank 1 failed: OSError: http://host/train-000.tar: Connection refused")


def fail_with_all_present() -> str:
    error = RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer")
    with closing(MissingRanks()) as missing_ranks:
        if current_case().rank == 0:
            missing_ranks.explain(error)
        dist.barrier()
    return str(error)


def test_nobody_is_blamed_who_answers(ranks: RankPool) -> None:
    assert ranks.run(fail_with_all_present, world=3) == ["gloo/transport/tcp/pair.cc: Connection reset by peer"] * 3


def clean_fit() -> list[str]:
    trainer = rank_trainer(FourMinStrategy(), max_steps=2)
    trainer.fit(Net(), images(2))
    return [t.name for t in threading.enumerate() if t.name.startswith("fourmin")] + [str(current_case().rank)]


def test_no_thread_outlives_a_fit(ranks: RankPool) -> None:
    assert ranks.run(clean_fit, world=2) == [["0"], ["1"]]
