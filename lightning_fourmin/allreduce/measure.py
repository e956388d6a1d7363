"""Where the time of a step goes: one stream of spans on one clock, which the trace and the meter both listen to.

    main thread   backward ....|b0|......|b1|....|b2|  waits      optimizer
    buckets                     [0 ........]  [1 .......]
                                                  [2 ............]
    exposed                     ==        ==      ===============      time in which the main thread cannot compute
    communication               =================================      time in which any bucket is in flight

`Spans` is the stream: the engine's threads and the strategy add to it. `Trace` keeps the last spans of its rank and
writes them as a file for Perfetto; `Meter` works out the two lower lines. Nothing is recorded while nobody listens, and
observing never blocks a step or makes it fail.
"""

import atexit
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_fourmin.allreduce.process_groups import broadcast_object
from lightning_fourmin.files import write_whole

log = logging.getLogger(__name__)

MAX_SPANS_A_RANK = 50_000
MAX_SPANS = 1_000_000
"""Spans of all ranks together: each rank keeps its share of them, the last ones."""
TRACE_NAME = "fourmin_trace.json"
NUM_PINGS = 9


# The clock and the stream.


class Stamp(NamedTuple):
    """A moment on the clock of all spans; on CUDA also an event, since the host runs ahead of the device."""

    ns: int
    event: torch.cuda.Event | None = None


UNHEARD = Stamp(0)
"""The moment of a span that nobody hears of."""


def now_ns() -> int:
    """The clock of all spans; it never jumps, and the ranks of a machine share it."""
    return time.perf_counter_ns()


def seconds_between(start: Stamp, stop: Stamp) -> float:
    """Seconds from one stamp to another; with events it waits until the device has reached the later one."""
    if start.event is None or stop.event is None:
        return 1e-9 * (stop.ns - start.ns)
    stop.event.synchronize()
    return 1e-3 * float(start.event.elapsed_time(stop.event))


@dataclass(frozen=True)
class Span:
    """Something that took time, in a lane: a thread of this rank, or `piece N` for piece N on its way."""

    lane: str
    name: str
    start: Stamp
    stop: Stamp
    details: dict[str, object] | None = None


@dataclass(frozen=True)
class HandOver(Span):
    """The main thread hands a bucket over to the engine: from the call of the hook to its return."""

    number: int = 0
    """Number of the bucket in the engine's order."""
    backward: int = 0
    """Number of the backward pass that it belongs to."""
    num_bytes: int = 0


@dataclass(frozen=True)
class InFlight(Span):
    """A bucket's whole way, from its hand-over until its mean is there."""

    number: int = 0


@dataclass(frozen=True)
class Wait(Span):
    """The main thread waits for other ranks outside of the engine."""


Listener = Callable[[Span], object]


@dataclass
class Spans:
    """The stream of spans of one rank: whoever listens is called with each span, in the thread that adds it."""

    device: torch.device
    listeners: list[Listener] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.listeners)

    def listen(self, listener: Listener) -> None:
        """From now on the listener gets every span. Called between steps."""
        # A new list, because threads of the engine may be going through the old one.
        self.listeners = [*self.listeners, listener]

    def now(self) -> Stamp:
        """A moment of the host: it is cheap, and the trace needs no other. While nobody listens it is any moment."""
        return Stamp(now_ns()) if self.listeners else UNHEARD

    def device_now(self) -> Stamp:
        """A moment that on CUDA is also marked on the device, which runs behind the host."""
        if self.device.type == "cpu" or not self.listeners:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Stamp(now_ns(), event)

    def add(self, lane: str, name: str, start: Stamp, details: dict[str, object] | None = None) -> None:
        """Adds a span that lasted from `start` until now."""
        if self.listeners:
            self.tell(Span(lane, name, start, self.now(), details))

    def tell(self, span: Span) -> None:
        """Gives a span to everyone who listens."""
        for listener in self.listeners:
            listener(span)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """A span of the main thread around something."""
        start = self.now()
        try:
            yield
        finally:
            self.add("main", name, start)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A span around a wait of the main thread for other ranks; on CUDA the wait of its stream."""
        start = self.device_now()
        try:
            yield
        finally:
            if self.listeners:
                self.tell(Wait("main", "wait for other ranks", start, self.device_now()))


# The meter: what communication costs a step.


class Communication(NamedTuple):
    """What the buckets of one training step took."""

    exposed_s: float
    """Time in which the main thread could not compute."""
    busy_s: float
    """Time in which any bucket was in flight."""
    num_bytes: int


@dataclass(frozen=True)
class BucketTimes:
    """When backward handed a bucket over, when the hook returned, and when the mean was there."""

    backward: int
    """Number of the backward pass that it belongs to."""
    num_bytes: int
    handed_over: Stamp
    handed_on: Stamp
    done: Stamp


class Meter:
    """Listens to the stream and keeps the times of buckets and waits from one `take` to the next.

    Hand-overs and waits come from the main thread, the ends of buckets from the engine's last stage. `take` is called
    in the main thread between steps, when nothing is in flight.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._handed: dict[int, HandOver] = {}
        self._done: dict[int, InFlight] = {}
        self._waits: list[Wait] = []
        self.paused = False
        """Set while something runs that is not part of a step, such as a validation: its waits do not count."""

    def __call__(self, span: Span) -> None:
        """Keeps a span that it needs."""
        if isinstance(span, HandOver):
            self._handed[span.number] = span
        elif isinstance(span, InFlight):
            self._done[span.number] = span
        elif isinstance(span, Wait) and not self.paused:
            self._waits.append(span)

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait of the main thread for other ranks that is outside of the strategy."""
        return self._spans.waiting()

    def take(self) -> "TakenTimes":
        """The times since the last call, once backward has returned."""
        buckets = [
            BucketTimes(handed.backward, handed.num_bytes, handed.start, handed.stop, self._done[number].stop)
            for number, handed in sorted(self._handed.items())
            if number in self._done
        ]
        taken = TakenTimes(tuple(buckets), tuple((wait.start, wait.stop) for wait in self._waits))
        self._handed, self._done, self._waits = {}, {}, []
        return taken


@dataclass(frozen=True)
class TakenTimes:
    """The times of a step; on CUDA `communication` waits until the device has reached them."""

    buckets: tuple[BucketTimes, ...]
    waits: tuple[tuple[Stamp, Stamp], ...]

    def communication(self) -> Communication:
        """The sums of the times, for the step as a whole."""
        exposed_s, busy_s, busy_until = sum(seconds_between(*wait) for wait in self.waits), 0.0, float("-inf")
        origin = self.buckets[0].handed_over if self.buckets else Stamp(0)
        for _, backward in groupby(self.buckets, key=lambda bucket: bucket.backward):
            ways = [
                [seconds_between(origin, moment) for moment in (times.handed_over, times.handed_on, times.done)]
                for times in backward
            ]
            exposed_s += sum(handed_on - handed_over for handed_over, handed_on, _ in ways[:-1])
            exposed_s += ways[-1][2] - ways[-1][0]
            for handed_over, _, end in ways:
                busy_s += max(0.0, end - max(handed_over, busy_until))
                busy_until = max(busy_until, end)
        return Communication(exposed_s, busy_s, sum(bucket.num_bytes for bucket in self.buckets))


# The trace: a file a rank, merged into one by whoever makes the report.


class Trace:
    """Listens to the stream and writes the last spans of this rank as a Chrome trace, on the clock of rank 0.

        main        [ training_step ][ backward   [bucket 0: [copy]]   [bucket 1: [copy]]          ][ optimizer ]
        scatter                                       [bucket 0]          [bucket 1]
        finish                                              [bucket 0: [copy]]
        piece 0                                   [reduce [queue]][scatter [queue]] ...

    A lane is a thread; a piece of a bucket has a track of its own, with its phases one after the other and, in each,
    how long the piece queued for the thread of the next stage. Every rank writes a file of its own, so that the spans
    of the others are there when one rank is lost; `merge_traces` makes one file of them.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._spans: deque[Span] = deque(maxlen=min(MAX_SPANS_A_RANK, MAX_SPANS // num_ranks))
        self._offset_ns = 0
        """How far rank 0's clock is ahead of this rank's."""
        self._run = ""
        """Tells the files of one run from those of an earlier run in the same folder."""

    def __call__(self, span: Span) -> None:
        """Keeps a span; the whole way of a bucket is left out, since its pieces show it."""
        if not isinstance(span, InFlight):
            self._spans.append(span)

    def align(self, device: torch.device) -> None:
        """Estimates how far this rank's clock is from rank 0's, by pings in turn: a collective call.

        The quickest ping counts: half of its round trip bounds the error. Clocks that drift apart later are not seen.
        """
        self._run = broadcast_object(uuid.uuid4().hex)
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        if self._rank == 0:
            for rank in range(1, self._num_ranks):
                for _ in range(NUM_PINGS):
                    dist.recv(clock, src=rank)
                    clock.item()  # blocks until the ping has arrived, on CUDA too
                    dist.send(clock.fill_(now_ns()), dst=rank)
            return
        pings = []
        for _ in range(NUM_PINGS):
            start_ns = now_ns()
            dist.send(clock, dst=0)
            dist.recv(clock, src=0)
            theirs_ns = int(clock.item())
            stop_ns = now_ns()
            pings.append((stop_ns - start_ns, theirs_ns - (start_ns + stop_ns) // 2))
        self._offset_ns = min(pings)[1]

    def write_at_exit(self, folder: str) -> None:
        """Makes a process write the file also if it ends without a call of `write`, as after a crash."""
        atexit.register(self.write, folder)

    def write(self, folder: str) -> None:
        """Writes this rank's file; where `folder` is an address such as s3://, to the current folder."""
        atexit.unregister(self.write)
        path = (Path.cwd() if "://" in folder else Path(folder)) / rank_file(self._rank)
        metadata = {"rank": self._rank, "num_ranks": self._num_ranks, "run": self._run}
        events = _events(self._rank, list(self._spans), self._offset_ns)
        try:
            write_whole(path, json.dumps({"traceEvents": events, "metadata": metadata}))
        except OSError as error:
            log.warning("no trace: %s cannot be written (%s); the training is not affected", path, error.strerror)


def rank_file(rank: int | str) -> str:
    """The name of a rank's trace; "*" gives the pattern of all names."""
    return f"fourmin_trace.rank{rank}.json"


def merge_traces(folder: Path) -> Path | None:
    """Makes one trace of the files that the ranks of the last run have left in a folder; None if there are none.

    Ranks whose file is missing are listed in its metadata as `ranks_without_spans`.
    """
    files = sorted(folder.glob(rank_file("*")), key=lambda file: file.stat().st_mtime)
    traces: dict[int, dict[str, Any]] = {}
    for file in reversed(files):  # the newest file says which run is meant
        with suppress(OSError, ValueError, KeyError):
            trace = json.loads(file.read_text())
            newest = next(iter(traces.values()), trace)
            if trace["metadata"]["run"] == newest["metadata"]["run"]:
                traces[trace["metadata"]["rank"]] = trace
    if not traces:
        return None
    num_ranks = next(iter(traces.values()))["metadata"]["num_ranks"]
    missing = [rank for rank in range(num_ranks) if rank not in traces]
    events = [event for rank in sorted(traces) for event in traces[rank]["traceEvents"]]
    path = folder / TRACE_NAME
    write_whole(path, json.dumps({"traceEvents": events, "metadata": {"ranks_without_spans": missing}}))
    return path


def _events(rank: int, spans: Sequence[Span], offset_ns: int) -> list[dict[str, Any]]:
    """The spans of one rank as events of a Chrome trace, in the order in which they open and close."""
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(s.lane for s in spans if not s.lane.startswith("piece ")))}
    heads: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for lane, number in lanes.items():
        heads.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
    ordered: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
    for span in spans:
        # Nothing is shorter than the clock's tick, so that a span never closes before it opens.
        start, stop = span.start.ns + offset_ns, max(span.stop.ns, span.start.ns + 1) + offset_ns
        event = {"name": span.name, "pid": rank, "args": span.details or {}, "ts": start / 1e3}
        opens, closes = (start, 1, -stop), (stop, 0, -start)
        if span.lane in lanes:
            ordered.append((opens, {**event, "ph": "X", "tid": lanes[span.lane], "dur": (stop - start) / 1e3}))
        else:
            track = {"cat": "piece", "id": span.lane.removeprefix("piece "), "tid": 0}
            ordered.append((opens, {**event, **track, "ph": "b"}))
            ordered.append((closes, {"name": span.name, "pid": rank, "ts": stop / 1e3, **track, "ph": "e"}))
    return heads + [event for _, event in sorted(ordered, key=lambda item: item[0])]
