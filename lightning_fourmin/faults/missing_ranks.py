"""Finds out which rank is gone: the first rank that meets an error calls the roll, and all ranks learn the answer.

    rank 0   meets an error, rings at every rank      a backend names an address at best, and a rank that leaves because
    rank 1   hears it: here                           of an error closes its connections, so later ones would blame it:
    rank 2   -                                        what the first roll call finds is what all ranks say
    rank 3   hears it: here

Nothing is sent before that: a thread of each rank waits for its own bell in the store of the process group.
"""

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_fourmin.allreduce.process_groups import gather_objects as gathered
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.faults.own_store import own_store

ANSWER_S = 2.0
"""How long a rank may take to answer: a thread does it, whatever the rank computes."""
HEARD_S = 2.0
"""How long a rank that leaves waits for the others to hear why: the store may leave with it."""
SAME_FAULT_S = 1.0
"""How long a rank that hears of a fault may take to meet it itself: an error that all ranks raise stays their own."""
LIMIT_S = ANSWER_S + HEARD_S + 2.0
POLL_S = 0.02
LONGEST_WAIT = timedelta(days=1)
"""Then the thread waits again."""
_BACKEND = re.compile(r"gloo/|NCCL|c10d|TCPStore")
"""Marks of the backends. A connection that was refused or broken may by itself be that of a rank's own data."""
_STORE_GONE = (
    "rank 0 is gone: the store of the process group, which lives in its process (under torchrun in the agent of the "
    "first node), does not answer"
)


class RollCall:
    """This rank's part in roll calls, from the start of a run to its end."""

    def __init__(self, when_known: Callable[[LostRankError], None]) -> None:
        """Made by all ranks together; `when_known` is called in a thread when others have found a fault."""
        self._when_known = when_known
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._store = own_store("roll_call")
        # Ranks that did not fail together have made different numbers of these.
        self._number = max(gathered(self._store.add(f"made/{self._rank}", 1)))
        self._verdict: str | None = None
        self._closed = self._store_is_silent = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="fourmin-roll-call", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._leaving.set()
        if self._store_is_silent:
            return  # a thread that waits for an answer holds the connection, and would have this one wait for it
        with suppress(dist.DistError):
            self._store.set(self._key("ring", self._rank), "")
        self._thread.join(timeout=1.0)

    def explain(self, error: BaseException) -> None:
        """Puts the rank at fault into the text of an error that other ranks caused, and tells them of any other."""
        self._leaving.set()
        lost = isinstance(error, LostRankError | dist.DistError) or _BACKEND.search(str(error)) is not None
        own = None if lost else f"rank {self._rank} failed: {type(error).__name__}: {error}"
        # The store's host may be stopped, and then its clients wait without end: in a thread of its own.
        thread = threading.Thread(target=self._investigate, args=(own,), name="fourmin-roll-call-asks", daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        self._store_is_silent = thread.is_alive()
        verdict = self._verdict or (_STORE_GONE if self._store_is_silent else None)
        if lost and verdict is not None:
            met = "" if str(error) == verdict else f" [{error}]"
            error.args = (f"{verdict}; resume from the last checkpoint{met}",)

    def _investigate(self, own: str | None) -> None:
        try:
            for rank in range(self._num_ranks):
                self._store.set(self._key("ring", rank), "")
            found = own or self._missing()
            if self._verdict is None and found is not None:
                self._verdict = self._store.compare_set(self._key("verdict"), "", found).decode()
            if self._verdict is not None:
                self._wait_until_heard()
        except dist.DistError:
            self._verdict = self._verdict or _STORE_GONE

    def _missing(self) -> str | None:
        """Who does not answer; None if all do or somebody has found out already."""
        missing = list(range(self._num_ranks))
        deadline = time.monotonic() + ANSWER_S
        while missing and time.monotonic() < deadline:
            if self._verdict is not None:
                return None
            missing = [rank for rank in missing if not self._store.check([self._key("here", rank)])]
            time.sleep(POLL_S)
        if not missing:
            return None
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
        return f"{who} gone: killed, stopped, or on a machine that does not answer"

    def _wait_until_heard(self) -> None:
        deadline = time.monotonic() + HEARD_S
        while time.monotonic() < deadline:
            present = [rank for rank in range(self._num_ranks) if self._store.check([self._key("here", rank)])]
            if self._store.check([self._key("heard", rank) for rank in present]):
                return
            time.sleep(POLL_S)

    def _attend(self) -> None:
        """The life of the thread: waits for the bell, answers, and keeps what was found."""
        try:
            store = own_store("roll_call")
            self._wait_for_ring(store)
            if self._closed:
                return
            store.set(self._key("here", self._rank), "")
            deadline = time.monotonic() + LIMIT_S
            while not store.check([self._key("verdict")]):
                if self._closed or time.monotonic() > deadline:
                    return  # nobody was found to be missing
                time.sleep(POLL_S)
            self._verdict = store.get(self._key("verdict")).decode()
            store.set(self._key("heard", self._rank), "")
        except dist.DistError:
            self._verdict = self._verdict or _STORE_GONE
        if not self._leaving.wait(SAME_FAULT_S):
            self._when_known(LostRankError(self._verdict))

    def _wait_for_ring(self, store: dist.Store) -> None:
        ring = [self._key("ring", self._rank)]
        while True:
            try:
                store.wait(ring, LONGEST_WAIT)
                return
            except dist.DistStoreError:
                # Nobody rang for all that time, or the store is gone: then this fails, too.
                if store.check(ring):
                    return

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._number, *parts)))
