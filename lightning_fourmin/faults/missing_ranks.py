"""Which ranks are missing: while a phase of an all-reduce waits for long, and after an error of any rank.

Both questions are answered by one board in the store of the process group and one helper thread in each rank:

             waits                             left   here   heard       alarm: yes
    rank 0   "4 bucket 7, phase scatter ..."          yes    yes         verdict: rank 3 is gone: killed, ...
    rank 1   "4 bucket 7, phase scatter ..."          yes    yes
    rank 2   "3 bucket 7, phase gather ..."           yes
    rank 3

*Who has not arrived?* A rank that waits for long posts what it waits for, again and again, each time with a larger
number. A rank that has posted nothing is one that the others wait for; one whose post stays the same was stopped while
it waited. Nothing is posted as long as no wait is long. On CUDA the host waits for no phase: there NCCL's own watchdog
is the one that speaks.

*Who is gone?* An error of the backend names an address at best, and a rank that leaves because of an error closes its
connections, so that later ranks would blame that one. So the first rank that meets an error raises the alarm, and the
helper thread of each rank answers "here", whatever its rank computes. Ranks that do not answer are gone. The first
finding is the verdict, and what all ranks report; where a rank has failed by itself, its error is the verdict.
"""

import atexit
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from lightning_fourmin._lightning import get_default_store
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.text import rank_list

log = logging.getLogger(__name__)

V = TypeVar("V")
LISTEN_S = 0.25
"""How often the helper thread looks for an alarm; less often where the ranks are many."""
MAX_QUESTIONS_A_S = 1000
"""How often all ranks together look for an alarm at the most: the store lives in the process of rank 0."""
LOOK_S = 1.0
"""How often it looks at the waits of its rank; four times within the limit of the warnings where that is shorter."""
UNCHANGED_FOR = 4
"""Looks within which a rank that waits posts again, however busy its machine is."""
POLL_S = 0.05
"""How often the board is read after an alarm."""
ANSWER_S = 2.0
"""How long a rank may take to answer an alarm once its helper thread looks: whatever the rank computes."""
HEARD_S = 2.0
"""How long a rank that leaves waits for the others to hear why: the store may leave with it."""
SAME_FAULT_S = 1.0
"""How long a rank that hears of a fault may take to meet it itself: an error that all ranks raise stays their own."""
STORE_ANSWER_S = 5.0
"""How long the store may take to answer a question."""
_COLUMNS = ("waits", "left", "here", "heard")
_BACKEND = re.compile(r"gloo/|NCCL|c10d|TCPStore")
"""Marks of the backends. A connection that was refused or broken may by itself be that of a rank's own data."""
_STORE_GONE = (
    "rank 0 is gone: the store of the process group, which lives in its process (under torchrun in the agent of the "
    "first node), does not answer"
)


class Wait(NamedTuple):
    """Something that this rank is doing, which may be waiting for another rank."""

    since_s: float
    """When it began, on the monotonic clock."""
    what: str
    missing_rank: int | None
    """The rank that it waits for; None where that is not known."""


class Waiter(Protocol):
    """What waits for other ranks, such as the engine. The helper thread calls both methods."""

    def waits(self) -> list[Wait]:
        """What it is doing now."""

    def fail(self, error: LostRankError) -> None:
        """Ends all waits: a rank is gone, and this one shall not wait for others that wait for it."""


class MissingRanks:
    """This rank's part in finding missing ranks, from the moment when the ranks have met to the end of the run.

    The strategy makes it together with those of all ranks, lets it `watch` the engine, has it `explain` the error that
    ends the run, and closes it. An engine works without it as well, and warns of nothing then.

    Threads: the helper thread looks at the waits, warns, posts, and answers alarms. The main thread calls `explain`,
    and a thread of the engine calls `explain_wait` when its wait has ended with an error. All of them reach the store
    through `_Board`, whose thread does nothing but ask it: a store whose host is stopped holds up nobody else. Both
    threads are daemons, and they are closed at the exit of the interpreter as well, since a run may end without a
    teardown: a thread that comes back from C++ while the interpreter goes down aborts the process.

    Args:
        stall_warning_s: seconds; a wait that takes longer is warned of once, with the ranks that have not arrived.
            None: no warnings.
    """

    def __init__(self, stall_warning_s: float | None = None) -> None:
        self._limit_s = stall_warning_s
        self._look_s = LOOK_S if stall_warning_s is None else min(LOOK_S, stall_warning_s / 4)
        self._board = _Board()
        self._listen_s = max(LISTEN_S, self._board.num_ranks / MAX_QUESTIONS_A_S)
        self._waiter: Waiter | None = None
        self._verdict: str | None = None
        """What was found out, set by whichever thread is the first to know."""
        self._left = False
        """A wait has ended with an error: from then on the post of this rank stays as it is."""
        self._leaving, self._stop = threading.Event(), threading.Event()
        # These belong to the helper thread.
        self._num_posts, self._is_posted = 0, False
        self._arrivals: dict[tuple[float, str], _Arrivals] = {}
        self._warned: set[tuple[float, str]] = set()
        self._told: Waiter | None = None
        self._alarm_s: float | None = None
        self._verdict_s: float | None = None
        self._thread = threading.Thread(target=self._help, name="fourmin-missing-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def watch(self, waiter: Waiter) -> None:
        """Looks at what `waiter` waits for from now on, and ends its waits when a rank is gone."""
        self._waiter = waiter

    def forget(self, waiter: Waiter) -> None:
        """Ends what `watch` has begun."""
        if self._waiter is waiter:
            self._waiter = None

    def close(self) -> None:
        """Ends the threads; they are left behind where they wait for a store that does not answer."""
        atexit.unregister(self.close)
        self._leaving.set()
        self._stop.set()
        self._thread.join(timeout=1.0)
        self._board.close()

    def explain_wait(self, wait: Wait) -> str | None:
        """Who had not arrived, for a wait that ends with an error; None if it was too short for others to post."""
        if self._limit_s is None or time.monotonic() - wait.since_s < 3 * self._look_s:
            return None
        self._left = True
        with suppress(dist.DistError, _SilentStoreError):
            # The others shall not take a post that stays the same for that of a rank that is stopped.
            self._board.post("left", "yes")
        arrivals = _Arrivals(self._board, wait)
        while (found := arrivals.look()) is None:
            time.sleep(self._look_s)
        return found

    def explain(self, error: BaseException) -> None:
        """Puts the rank at fault into the text of an error that other ranks caused, and tells them of any other."""
        self._leaving.set()
        lost = isinstance(error, LostRankError | dist.DistError) or _BACKEND.search(str(error)) is not None
        own = None if lost else f"rank {self._board.rank} failed: {type(error).__name__}: {error}"
        try:
            self._raise_alarm(own)
        except (dist.DistError, _SilentStoreError):
            self._verdict = self._verdict or _STORE_GONE
        if lost and self._verdict is not None:
            met = "" if str(error) == self._verdict else f" [{error}]"
            error.args = (f"{self._verdict}; resume from the last checkpoint{met}",)

    def _raise_alarm(self, own: str | None) -> None:
        """Finds the verdict, and waits until the other ranks have heard it."""
        answers_due_s = time.monotonic() + self._listen_s + ANSWER_S
        self._board.raise_alarm()
        found = own or self._who_is_gone(answers_due_s)
        if self._verdict is None and found is not None:
            self._verdict = self._board.agree_on(found)
        deadline_s = time.monotonic() + self._listen_s + HEARD_S
        while self._verdict is not None and (now_s := time.monotonic()) < deadline_s:
            answers = self._board.columns("here", "heard")
            # A rank that has not answered may do so until the answers are due.
            if all(heard or (not here and now_s > answers_due_s) for here, heard in answers):
                return
            time.sleep(POLL_S)

    def _who_is_gone(self, answers_due_s: float) -> str | None:
        """The ranks that do not answer; None if all do, or if somebody has found out already."""
        while self._verdict is None:
            answers = enumerate(self._board.columns("here"))
            missing = [rank for rank, (here,) in answers if not here and rank != self._board.rank]
            if not missing:
                return None
            if time.monotonic() > answers_due_s:
                verb = "is" if len(missing) == 1 else "are"
                return f"{rank_list(missing)} {verb} gone: killed, stopped, or on a machine that does not answer"
            time.sleep(POLL_S)
        return None

    def _help(self) -> None:
        """The life of the helper thread: only this and what it calls below runs there."""
        idle_s, next_look_s = min(self._listen_s, self._look_s), 0.0
        pause_s = idle_s
        while not self._stop.wait(pause_s):
            now_s = time.monotonic()
            if now_s >= next_look_s:
                next_look_s = now_s + self._look_s
                self._look_at_waits(now_s)
            if self._verdict_s is None:
                self._listen(now_s)
            elif now_s - self._verdict_s > SAME_FAULT_S:
                self._pass_on_verdict()
            is_urgent = self._alarm_s is not None and now_s - self._alarm_s < ANSWER_S + HEARD_S
            pause_s = POLL_S if is_urgent and self._verdict_s is None else idle_s

    def _look_at_waits(self, now_s: float) -> None:
        """Posts the first wait that is long, and warns of those that are too long."""
        if self._limit_s is None:
            return
        waiter = self._waiter
        waits = [] if waiter is None else waiter.waits()
        self._post(next((wait.what for wait in waits if now_s - wait.since_s > self._look_s), ""))
        present = {wait[:2] for wait in waits}
        self._warned &= present
        self._arrivals = {key: arrivals for key, arrivals in self._arrivals.items() if key in present}
        for wait in waits:
            if now_s - wait.since_s <= self._limit_s or wait[:2] in self._warned:
                continue
            who = self._arrivals.setdefault(wait[:2], _Arrivals(self._board, wait)).look()
            if who is not None:
                self._warned.add(wait[:2])
                log.warning("%s has waited for more than %g s; %s", wait.what, self._limit_s, who)

    def _post(self, what: str) -> None:
        """Posts again and again as long as something waits, and once more when nothing does."""
        if self._left or not (what or self._is_posted):
            return
        self._num_posts += 1
        with suppress(dist.DistError, _SilentStoreError):
            self._board.post("waits", f"{self._num_posts} {what}" if what else "")
            self._is_posted = bool(what)

    def _listen(self, now_s: float) -> None:
        """Answers an alarm, and keeps the verdict."""
        try:
            alarm, verdict = self._board.alarm()
            if alarm and self._alarm_s is None:
                self._board.post("here", "yes")
                self._alarm_s = now_s
            if verdict:
                self._board.post("heard", "yes")
                self._verdict, self._verdict_s = verdict, now_s
        except dist.DistError:
            self._verdict, self._verdict_s = self._verdict or _STORE_GONE, now_s
        except _SilentStoreError:
            pass

    def _pass_on_verdict(self) -> None:
        """Ends the waits of a rank that has not met the fault itself."""
        waiter = self._waiter
        if waiter is not None and waiter is not self._told and not self._leaving.is_set():
            self._told = waiter
            waiter.fail(LostRankError(self._verdict))


class _Arrivals:
    """Who has arrived at one long wait. Posts may have to be compared with later ones, so it can take several looks."""

    def __init__(self, board: "_Board", wait: Wait) -> None:
        self._board, self._wait = board, wait
        self._first: dict[int, tuple[str, ...]] = {}
        self._num_looks = 0

    def look(self) -> str | None:
        """Who is missing, in words; None: that will take another look."""
        self._num_looks += 1
        if 1 < self._num_looks <= UNCHANGED_FOR:
            return None
        try:
            columns = self._board.columns("waits", "left")
        except (dist.DistError, _SilentStoreError):
            rank = self._wait.missing_rank
            direct = "another rank" if rank is None else f"rank {rank}"
            return f"it waits for {direct}; the store, which knows about the others, does not answer"
        posts = {rank: post for rank, post in enumerate(columns) if rank != self._board.rank}
        if self._num_looks == 1:
            self._first = posts
            missing = [rank for rank, (waits, left) in posts.items() if not waits and not left]
        else:
            missing = [rank for rank, post in self._first.items() if posts[rank] == post and not post[1]]
        if missing:
            return f"not arrived: {rank_list(missing)} (slow, stopped or gone?)"
        if self._num_looks == 1:
            return None
        told = "; ".join(f"rank {rank}: {waits.partition(' ')[2]}" for rank, (waits, _) in self._first.items())
        return f"all ranks have arrived and wait, so look at the network ({told})"


class _SilentStoreError(Exception):
    """The store has not answered in time."""


class _Board:
    """What each rank says, in the store of the process group.

    A client whose server is stopped waits without end: torch bounds none of its requests, and the one that it does
    bound, `wait`, writes to stderr whenever its time is up. So a thread of the board puts all questions to the store,
    and whoever has one waits for the answer for `STORE_ANSWER_S`. After a question without an answer no other is put
    until it is answered after all. The thread lives as long as the board: a thread for each question would begin and
    end all the time, and loader workers are forked; a fork at the moment when another thread begins or ends can leave
    the child with a lock that nobody releases.
    """

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # A name of its own: ranks that did not fail together have made different numbers of boards before this one.
        name = [uuid.uuid4().hex]
        if self.rank == 0:
            # The empty board is there before anybody knows its name, so that no question waits for a key.
            store = _own_store(name[0])
            fields = [f"{rank}/{column}" for rank in range(self.num_ranks) for column in _COLUMNS]
            for key in (*fields, "alarm", "verdict"):
                store.set(key, "")
        dist.broadcast_object_list(name, src=0)
        self._store = store if self.rank == 0 else _own_store(name[0])
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._unanswered: threading.Event | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._ask_store, name="fourmin-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, or leaves it behind where the store does not answer; further questions have no answer."""
        self._is_closed = True
        self._questions.put(None)
        self._thread.join(timeout=1.0)

    def post(self, column: str, text: str) -> None:
        """Fills in a field of this rank."""
        self._ask(lambda: self._store.set(f"{self.rank}/{column}", text))

    def columns(self, *columns: str) -> list[tuple[str, ...]]:
        """These fields of each rank, in the order of ranks."""
        keys = [f"{rank}/{column}" for rank in range(self.num_ranks) for column in columns]
        fields = iter([field.decode() for field in self._ask(lambda: self._store.multi_get(keys))])
        return list(zip(*[fields] * len(columns), strict=True))

    def raise_alarm(self) -> None:
        """Asks the helper threads of all ranks to answer."""
        self._ask(lambda: self._store.set("alarm", "yes"))

    def alarm(self) -> tuple[bool, str]:
        """Whether there is an alarm, and the verdict, empty as long as there is none."""
        alarm, verdict = self._ask(lambda: self._store.multi_get(["alarm", "verdict"]))
        return bool(alarm), verdict.decode()

    def agree_on(self, verdict: str) -> str:
        """The verdict of all ranks: this one, or an earlier one."""
        return self._ask(lambda: self._store.compare_set("verdict", "", verdict)).decode()

    def _ask(self, question: Callable[[], V]) -> V:
        if self._is_closed or (self._unanswered is not None and not self._unanswered.is_set()):
            raise _SilentStoreError
        answers: list[V] = []
        errors: list[Exception] = []
        is_answered = threading.Event()

        def ask() -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(error)
            finally:
                is_answered.set()

        self._questions.put(ask)
        if not is_answered.wait(STORE_ANSWER_S):
            self._unanswered = is_answered
            raise _SilentStoreError
        if errors:
            raise errors[0]
        return answers[0]

    def _ask_store(self) -> None:
        """The life of the board's thread."""
        while (ask := self._questions.get()) is not None:
            ask()


def _own_store(name: str) -> dist.Store:
    """The store of the process group under keys of its own, by a connection that holds up nobody else's."""
    store = get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=STORE_ANSWER_S))
    return dist.PrefixStore(f"fourmin/missing_ranks/{name}", store)
