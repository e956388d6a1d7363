"""Says so when a phase of an all-reduce waits long, while it still waits, and which ranks have not arrived.

    rank 0   waits for 2 --.         a rank that waits long posts that in the store of the process group;
    rank 1   waits for 0   |         who has posted nothing is the one that the others wait for:
    rank 2   waits for 3 <-'         rank 3, on every rank
    rank 3   stopped, or slow

A rank that waits posts again and again, so that one which was stopped while it waited is found as well: its post stays
the same. Nothing is posted or asked as long as no wait is long. On CUDA the host waits for no phase: there NCCL's own
watchdog is the one that speaks.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from lightning_fourmin.faults.own_store import STORE_ANSWER_S, own_store
from lightning_fourmin.text import rank_list

log = logging.getLogger(__name__)

POST_AFTER_S = 1.0
UNCHANGED_FOR = 4
"""Intervals in which a rank that waits posts again, however busy its machine is."""


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
        self._stop.set()
        if time.monotonic() - wait.since_s < 3 * self._interval_s:
            return None
        return self._who_is_missing(wait, leaving=True)

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

    def _who_is_missing(self, wait: Wait, leaving: bool = False) -> str:
        posts = self._board.read(leaving)
        if posts is None:
            direct = "another rank" if wait.missing_rank is None else f"rank {wait.missing_rank}"
            return f"it waits for {direct}; the store, which knows about the others, does not answer"
        others = {rank: post for rank, post in enumerate(posts) if rank != self._board.rank}
        missing = [rank for rank, post in others.items() if not post.what]
        if not missing:
            for _ in range(UNCHANGED_FOR):
                time.sleep(self._interval_s)
                if not leaving:
                    self._board.post(wait.what)
            later = self._board.read() or posts
            missing = [rank for rank, post in others.items() if later[rank] == post and not post.left]
        if missing:
            return f"not arrived: {rank_list(missing)} (slow, stopped or gone?)"
        told = "; ".join(f"rank {rank}: {post.what}" for rank, post in others.items())
        return f"all ranks have arrived and wait, so look at the network ({told})"


class _Post(NamedTuple):
    """What a rank has said last."""

    number: int
    what: str
    """What it waits for, empty if it does not."""
    left: bool
    """It ends with an error and posts no more."""


class _Board:
    """What each rank waits for, in the store of the process group."""

    def __init__(self, number: int) -> None:
        self._store = own_store(f"stall{number}")
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._number = 0
        self._posted = ""
        self._store.set(f"{self.rank}/waits", "0 ")
        self._store.set(f"{self.rank}/left", "")

    def post(self, what: str) -> None:
        if what or self._posted:
            self._number += 1
            self._posted = what
            with suppress(dist.DistError):
                self._store.set(f"{self.rank}/waits", f"{self._number} {what}")

    def read(self, leaving: bool = False) -> list[_Post] | None:
        """What all ranks have posted; None if the store does not answer: its host may be what everyone waits for."""
        keys = [f"{rank}/{key}" for rank in range(self._num_ranks) for key in ("waits", "left")]
        found: list[list[bytes]] = []

        def ask() -> None:
            # A client whose server is stopped waits without end, so it waits in a thread of its own.
            with suppress(dist.DistError):
                if leaving:
                    self._store.set(f"{self.rank}/left", "yes")
                found.append(self._store.multi_get(keys))

        thread = threading.Thread(target=ask, name="fourmin-stall-board", daemon=True)
        thread.start()
        thread.join(2 * STORE_ANSWER_S)
        if not found:
            return None
        texts = [text.decode() for text in found[0]]
        parts = ((waits.partition(" "), left) for waits, left in zip(texts[::2], texts[1::2], strict=True))
        return [_Post(int(number), what, bool(left)) for (number, _, what), left in parts]
