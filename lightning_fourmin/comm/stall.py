"""Says so when a phase of an all-reduce waits long, while it still waits, and which ranks have not arrived.

    rank 0   waits for 2 --.         a rank that waits long posts that in the store of the process group;
    rank 1   waits for 0   |         who has posted nothing is the one that the others wait for:
    rank 2   waits for 3 <-'         rank 3, on every rank
    rank 3   stopped, or slow

Nothing is posted or asked as long as no wait is long. On CUDA the host waits for no phase: there NCCL's own watchdog
is the one that speaks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from lightning_fourmin.comm.store import ANSWER_S, own_store

log = logging.getLogger(__name__)

POST_AFTER_S = 1.0


class Wait(NamedTuple):
    """Something that a stage is doing, which may be waiting."""

    since_s: float
    """On the monotonic clock."""
    what: str
    missing_rank: int | None
    """The rank that it waits for, None where it is not known."""


class StallWatch:
    """A thread that looks at what the stages wait for and warns once for each wait beyond the limit."""

    def __init__(self, limit_s: float, waits: Callable[[], list[Wait]], number: int) -> None:
        """`number` is the same on all ranks, and another one after a run that has failed."""
        self._limit_s, self._waits = limit_s, waits
        self._interval_s = min(POST_AFTER_S, limit_s / 4)
        self._board = _Board(number)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fourmin-stall-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)

    def explain(self, wait: Wait) -> str | None:
        """Who had not arrived, for a wait that ends with an error; None if it was too short for others to post."""
        # What this rank has posted stays: to ranks that go on waiting it is not the missing one.
        self._stop.set()
        return None if time.monotonic() - wait.since_s < 3 * self._interval_s else self._who_is_missing(wait)

    def _watch(self) -> None:
        warned: set[tuple[float, str]] = set()
        while not self._stop.wait(self._interval_s):
            waits = self._waits()
            now_s = time.monotonic()
            self._board.post(next((wait.what for wait in waits if now_s - wait.since_s > self._interval_s), ""))
            warned.intersection_update({wait[:2] for wait in waits})
            for wait in waits:
                if now_s - wait.since_s > self._limit_s and wait[:2] not in warned:
                    warned.add(wait[:2])
                    who = self._who_is_missing(wait)
                    log.warning("%s has waited for more than %g s; %s", wait.what, self._limit_s, who)

    def _who_is_missing(self, wait: Wait) -> str:
        everyones = self._board.read()
        if everyones is None:
            direct = "another rank" if wait.missing_rank is None else f"rank {wait.missing_rank}"
            return f"it waits for {direct}; the store, which knows about the others, does not answer"
        missing = [rank for rank, what in enumerate(everyones) if not what and rank != self._board.rank]
        if missing:
            return f"not arrived: {listed(missing)} (slow, stopped or gone?)"
        others = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(everyones) if rank != self._board.rank)
        return f"all ranks have arrived and wait, so look at the network ({others})"


class _Board:
    """What each rank waits for, empty where it does not, in the store of the process group."""

    def __init__(self, number: int) -> None:
        self._store = own_store(f"stall{number}")
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._posted = ""
        self._store.set(str(self.rank), self._posted)

    def post(self, what: str) -> None:
        if what != self._posted:
            self._posted = what
            with suppress(dist.DistError):
                self._store.set(str(self.rank), what)

    def read(self) -> list[str] | None:
        """What all ranks have posted; None if the store does not answer: its host may be what everyone waits for."""
        found: list[list[bytes]] = []

        def ask() -> None:
            # A client whose server is stopped waits without end, so it waits in a thread of its own.
            with suppress(dist.DistError):
                found.append(self._store.multi_get([str(rank) for rank in range(self._num_ranks)]))

        thread = threading.Thread(target=ask, name="fourmin-stall-board", daemon=True)
        thread.start()
        thread.join(2 * ANSWER_S)
        return [text.decode() for text in found[0]] if found else None


def listed(ranks: Iterable[int]) -> str:
    """Ranks with runs of neighbours drawn together: `ranks 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if runs == [[runs[0][0]] * 2] else 's'} {names}"
