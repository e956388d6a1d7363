"""Which ranks are missing: while a phase of an all-reduce waits for long, and after an error of any rank.

Both questions are answered by one board in the store of the process group and one helper thread in each rank:

             waits                             left   here   heard       alarm: yes
    rank 0   "4 bucket 7, phase scatter ..."          yes    yes         verdict: rank 3 is gone: killed, ...
    rank 1   "4 bucket 7, phase scatter ..."          yes    yes
    rank 2   "3 bucket 7, phase gather ..."           yes
    rank 3

*Who has not arrived?* A rank whose wait is long posts what it waits for, again and again, each time with a larger
number. The others wait for a rank that has posted nothing; a rank whose post stays the same was stopped while it
waited. Nothing is posted as long as no wait is long. On CUDA the host waits for no phase, so nothing is posted or
warned of there: NCCL's own watchdog does that.

*Who is gone?* An error of the backend names an address at best, and a rank that leaves because of an error closes its
connections, so other ranks would blame that rank. So the first rank that meets an error raises the alarm, and the
helper thread of each rank answers "here", whatever the main thread computes. Ranks that do not answer are gone. The
first finding is the verdict, which all ranks report; where a rank has failed by itself, its error is the verdict.
"""

import atexit
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from lightning_fourmin._lightning import get_default_store
from lightning_fourmin.errors import LostRankError
from lightning_fourmin.text import rank_list

log = logging.getLogger(__name__)

V = TypeVar("V")
LISTEN_S = 1.0
"""The pause between two looks of the helper thread for an alarm; it is longer where the ranks are many. Looks cost time
of cores that compute: four of them a second made steps about 1 % longer with 8 ranks on 2 cores."""
MAX_QUESTIONS_A_S = 1000
"""How often all ranks together may look for an alarm: the store lives in the process of rank 0."""
LOOK_S = 1.0
"""The pause between two looks of the helper thread at the waits of its rank, or a quarter of `stall_warning_s` if that
is shorter."""
UNCHANGED_FOR = 4
"""The number of looks within which a rank that waits posts again, however busy its machine is."""
POLL_S = 0.05
"""The pause between two looks at the board after an alarm."""
ANSWER_S = 2.0
"""How long a rank may take to answer an alarm once its helper thread looks."""
HEARD_S = 2.0
"""How long a rank that leaves waits for the others to hear why: the store may leave with it."""
SAME_FAULT_S = 1.0
"""How long a rank that hears of a fault may take to meet it itself, so that an error that all ranks raise is reported
by each as its own."""
STORE_ANSWER_S = 5.0
"""How long the store may take to answer a question."""
_COLUMNS = ("waits", "left", "here", "heard")
_BACKEND = re.compile(r"gloo/|NCCL|c10d|TCPStore")
"""What tells errors of the backends from others: "connection refused" may as well be about a rank's own data."""
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
        """Returns what the waiter is doing now."""

    def fail(self, error: LostRankError) -> None:
        """Ends all waits: a rank is gone, and this one shall not wait for others that wait for that rank."""


class MissingRanks:
    """This rank's part in finding missing ranks, from the moment when the ranks have met to the end of the run.

    The strategy makes it together with those of all ranks, lets it `watch` the engine, has it `explain` the error that
    ends the run, and closes it. An engine works without a `MissingRanks`, too, and then warns of nothing.

    Threads: the helper thread looks at the waits, warns, posts, and answers alarms. The main thread calls `explain`,
    and a thread of the engine calls `explain_wait` when its wait has ended with an error. All of them reach the store
    through `_Board`, whose thread does nothing but ask the store: if the host of the store is stopped, only that thread
    is stuck. Both threads are daemons. They are closed at the exit of the interpreter as well, since a run may end
    without a teardown, and a thread that comes back from C++ while the interpreter goes down aborts the process.

    Args:
        stall_warning_s: The time in seconds after which a wait is warned of, once, with the ranks that have not
            arrived. None: no warnings.
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
        """Whether a wait has ended with an error: from then on the post of this rank stays as it is."""
        self._leaving, self._stop = threading.Event(), threading.Event()
        self._alarm_s: float | None = None
        """The moment when the helper thread heard of an alarm, which the main thread reads, too."""
        # Only the helper thread uses the fields below.
        self._num_posts, self._is_posted = 0, False
        self._arrivals: dict[tuple[float, str], _Arrivals] = {}
        """The waits that are too long, by their beginning and text."""
        self._told: Waiter | None = None
        """The waiter whose waits were ended because of the verdict."""
        self._verdict_s: float | None = None
        """The moment when the helper thread heard of the verdict."""
        self._thread = threading.Thread(target=self._help, name="fourmin-missing-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def watch(self, waiter: Waiter) -> None:
        """Lets the helper thread look at what `waiter` waits for, and end its waits when a rank is gone."""
        self._waiter = waiter

    def forget(self, waiter: Waiter) -> None:
        """Ends what `watch` has begun."""
        if self._waiter is waiter:
            self._waiter = None

    def close(self) -> None:
        """Ends the threads, or leaves them behind where the store does not answer them."""
        atexit.unregister(self.close)
        self._leaving.set()
        self._stop.set()
        self._thread.join(timeout=1.0)
        self._board.close()

    def explain_wait(self, wait: Wait) -> str | None:
        """Says who had not arrived when a wait ended with an error; None if it was too short for others to post."""
        if self._limit_s is None or time.monotonic() - wait.since_s < 3 * self._look_s:
            return None
        self._left = True
        with suppress(dist.DistError, _SilentStoreError):
            # Otherwise the others would take this rank, whose post stays the same from now on, for a stopped one.
            self._board.post("left", "yes")
        arrivals = _Arrivals(self._board, wait)
        while (found := arrivals.look()) is None:
            time.sleep(self._look_s)
        return found

    def explain(self, error: BaseException) -> None:
        """Puts the rank at fault into the text of an error that other ranks caused.

        Any other error is this rank's own: the other ranks are told of it, and its text stays.
        """
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
        # Where another rank has raised the alarm, the others have had time to answer since then.
        answers_due_s = (self._alarm_s or time.monotonic()) + self._listen_s + ANSWER_S
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
        """Names the ranks that do not answer; None if all do, or if there is a verdict already."""
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
        """Runs in the helper thread, as do the methods below, which nothing else calls."""
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
            is_urgent = self._alarm_s is not None and now_s - self._alarm_s < ANSWER_S + HEARD_S + SAME_FAULT_S
            pause_s = POLL_S if is_urgent else idle_s

    def _look_at_waits(self, now_s: float) -> None:
        """Posts the first wait that is longer than a look, and warns of those that are longer than the limit."""
        if self._limit_s is None:
            return
        waiter = self._waiter
        waits = [] if waiter is None else waiter.waits()
        self._post(next((wait.what for wait in waits if now_s - wait.since_s > self._look_s), ""))
        too_long = {wait[:2]: wait for wait in waits if now_s - wait.since_s > self._limit_s}
        self._arrivals = {key: self._arrivals.get(key) or _Arrivals(self._board, too_long[key]) for key in too_long}
        for (_, what), arrivals in self._arrivals.items():
            if not arrivals.is_told and (who := arrivals.look()) is not None:
                arrivals.is_told = True
                log.warning("%s has waited for more than %g s; %s", what, self._limit_s, who)

    def _post(self, what: str) -> None:
        """Posts at each look at which something waits, and clears the post at the first at which nothing does."""
        if self._left or not (what or self._is_posted):
            return
        self._num_posts += 1
        with suppress(dist.DistError, _SilentStoreError):
            self._board.post("waits", f"{self._num_posts} {what}" if what else "")
            self._is_posted = bool(what)

    def _listen(self, now_s: float) -> None:
        """Answers an alarm, and notes the verdict."""
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
    """Finds out who has arrived at one long wait.

    If every rank has posted, their posts are compared with later ones, which takes several looks.
    """

    def __init__(self, board: "_Board", wait: Wait) -> None:
        self.is_told = False
        """Whether the answer was found and has become a warning."""
        self._board, self._wait = board, wait
        self._first: dict[int, tuple[str, ...]] = {}
        self._num_looks = 0

    def look(self) -> str | None:
        """Says who is missing; None if that takes another look."""
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

    A client of the store whose server is stopped waits without end: torch bounds no request but `wait`, which writes to
    stderr whenever its time is up. So a thread of the board puts all questions to the store, and whoever asks waits at
    most `STORE_ANSWER_S` for the answer. After a question without an answer all others are refused until the answer
    comes. The thread lives as long as the board. One thread for each question would not do: loader workers are forked,
    and a fork at the moment when another thread begins or ends can leave the child with a lock that nobody releases.
    """

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # The board's keys begin with a random name. A count would not do: ranks that did not fail together have made
        # different numbers of boards before this one.
        name = [uuid.uuid4().hex]
        if self.rank == 0:
            # The fields are there before any other rank knows the name, so that no question waits for a key.
            store = _own_store(name[0])
            fields = [f"{rank}/{column}" for rank in range(self.num_ranks) for column in _COLUMNS]
            for key in (*fields, "alarm", "verdict"):
                store.set(key, "")
        dist.broadcast_object_list(name, src=0)
        self._store = store if self.rank == 0 else _own_store(name[0])
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._late: Future[Any] | None = None
        """The last answer that did not come in time."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._ask_store, name="fourmin-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, or leaves it behind where the store does not answer; later questions are refused."""
        self._is_closed = True
        self._questions.put(None)
        self._thread.join(timeout=1.0)

    def post(self, column: str, text: str) -> None:
        """Fills in a field of this rank."""
        self._ask(lambda: self._store.set(f"{self.rank}/{column}", text))

    def columns(self, *columns: str) -> list[tuple[str, ...]]:
        """Returns these fields of each rank, in the order of ranks."""
        keys = [f"{rank}/{column}" for rank in range(self.num_ranks) for column in columns]
        fields = iter([field.decode() for field in self._ask(lambda: self._store.multi_get(keys))])
        return list(zip(*[fields] * len(columns), strict=True))

    def raise_alarm(self) -> None:
        """Asks the helper threads of all ranks to answer."""
        self._ask(lambda: self._store.set("alarm", "yes"))

    def alarm(self) -> tuple[bool, str]:
        """Returns whether there is an alarm, and the verdict, which is empty as long as there is none."""
        alarm, verdict = self._ask(lambda: self._store.multi_get(["alarm", "verdict"]))
        return bool(alarm), verdict.decode()

    def agree_on(self, verdict: str) -> str:
        """Returns the verdict of all ranks, which is this one unless another rank was faster."""
        return self._ask(lambda: self._store.compare_set("verdict", "", verdict)).decode()

    def _ask(self, question: Callable[[], V]) -> V:
        """Puts a question to the store from any thread, and waits for the answer."""
        if self._is_closed or (self._late is not None and not self._late.done()):
            raise _SilentStoreError
        answer: Future[V] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(STORE_ANSWER_S)
        except TimeoutError:
            self._late = answer
            raise _SilentStoreError from None

    def _ask_store(self) -> None:
        """Runs in the board's thread until `close`."""
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)


def _own_store(name: str) -> dist.Store:
    """Opens a connection of its own to the store of the process group, with keys that begin with `name`."""
    store = get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=STORE_ANSWER_S))
    return dist.PrefixStore(f"fourmin/missing_ranks/{name}", store)
