"""Spans of time on every rank, merged into one Chrome trace (opens in Perfetto or chrome://tracing).

    main        [ training_step ][ backward   [bucket 0: [copy]]   [bucket 1: [copy]]          ][ optimizer ]
    scatter                                       [bucket 0]          [bucket 1]
    finish                                              [bucket 0: [copy]]
    piece 0                                   [reduce [queue]][scatter [queue]] ...

A lane is a thread; a piece of a bucket has a track of its own, with its phases one after the other and, in each, how
long the piece queued for the thread of the next stage.
"""

import json
import logging
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_fourmin.allreduce.broadcast_object import agreed
from lightning_fourmin.faults.missing_ranks import own_store
from lightning_fourmin.files import write_whole

log = logging.getLogger(__name__)

MAX_SPANS_A_RANK = 50_000
MAX_SPANS = 1_000_000
"""Of all ranks: the trace keeps the last spans of a run."""
FILE_NAME = "fourmin_trace.json"
NUM_PINGS = 9
GATHER_S = 10.0
CHUNK_BYTES = 1024 * 1024
"""The store refuses values of more than a few MiB."""

Span = tuple[str, str, int, int, dict[str, object] | None]
"""Lane or track, name, start and stop in ns, details."""


def now_ns() -> int:
    """The clock of all spans; it never jumps, and ranks of a machine share it."""
    return time.perf_counter_ns()


class Trace:
    """The last spans of this rank; appending is all that happens while training runs."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._store: dist.Store | None = None
        """Connected while rank 0 is there: a new connection would wait for it for long."""
        self._spans: deque[Span] = deque(maxlen=min(MAX_SPANS_A_RANK, MAX_SPANS // num_ranks))
        self._offset_ns = 0

    def add(self, lane: str, name: str, start_ns: int, details: dict[str, object] | None = None) -> None:
        """A span from `start_ns` until now."""
        self._spans.append((lane, name, start_ns, now_ns(), details))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        start_ns = now_ns()
        try:
            yield
        finally:
            self.add(lane, name, start_ns)

    @contextmanager
    def span_after(self, lane: str, name: str, work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """A span that begins when `work` has returned; gives `work` as it has to be called."""
        start_ns = now_ns()

        def timed() -> Any:
            nonlocal start_ns
            result = work()
            start_ns = now_ns()
            return result

        yield timed
        self.add(lane, name, start_ns)

    def align(self, device: torch.device) -> None:
        """Estimates how far this rank's clock is from rank 0's, by pings in turn: a collective call.

        The quickest ping counts: half of its round trip bounds the error. Clocks that drift apart later are not seen.
        """
        self._store = own_store(f"trace{agreed(uuid.uuid4().hex)}")  # spans of an earlier run may come late
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        for rank in range(1, self._num_ranks):
            if self._rank not in (0, rank):
                continue
            pings = []
            for _ in range(NUM_PINGS):
                if self._rank == 0:
                    dist.recv(clock, src=rank)
                    clock.item()  # has arrived, on CUDA too
                    dist.send(clock.fill_(now_ns()), dst=rank)
                else:
                    start_ns = now_ns()
                    dist.send(clock, dst=0)
                    dist.recv(clock, src=0)
                    theirs_ns = int(clock.item())
                    stop_ns = now_ns()
                    pings.append((stop_ns - start_ns, theirs_ns - (start_ns + stop_ns) // 2))
            if pings:
                self._offset_ns = min(pings)[1]

    def write_merged(self, folder: str) -> None:
        """Rank 0 writes the spans of all ranks that answer in time; the others give theirs through the store.

        Where `folder` is an address such as s3://, they go to the folder of now.
        """
        path = (Path.cwd() if "://" in folder else Path(folder)) / FILE_NAME
        if self._store is None:
            return  # clocks were never compared, for another error
        mine = zlib.compress(json.dumps([self._offset_ns, list(self._spans)]).encode())
        try:
            if self._rank != 0:
                _post(self._store, self._rank, mine)
                return
            everyones, missing = _collect(self._store, self._num_ranks)
        except dist.DistError as error:
            if self._rank != 0:
                log.warning("the spans of rank %d are not in the trace: rank 0 is gone (%s)", self._rank, error)
                return
            everyones, missing = {}, list(range(1, self._num_ranks))
        if missing:
            log.warning("%s has no spans of rank %s: no answer", path, ", ".join(map(str, missing)))
        everyones[0] = mine
        events = [event for rank in sorted(everyones) for event in _events(rank, everyones[rank])]
        try:
            write_whole(path, json.dumps({"traceEvents": events, "metadata": {"ranks_without_spans": missing}}))
        except OSError as error:
            log.warning("no trace: %s cannot be written (%s); the training is not affected", path, error.strerror)


def _post(store: dist.Store, rank: int, packed: bytes) -> None:
    chunks = [packed[i : i + CHUNK_BYTES] for i in range(0, len(packed), CHUNK_BYTES)]
    for number, chunk in enumerate(chunks):
        store.set(f"{rank}/{number}", chunk)  # type: ignore[arg-type]
    store.set(str(rank), str(len(chunks)))


def _collect(store: dist.Store, num_ranks: int) -> tuple[dict[int, bytes], list[int]]:
    """What the other ranks have posted, and those that have posted nothing when time is up."""
    everyones, missing = {}, []
    deadline = time.monotonic() + GATHER_S
    for rank in range(1, num_ranks):
        try:
            store.wait([str(rank)], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except dist.DistStoreError:
            missing.append(rank)
            continue
        keys = [f"{rank}/{number}" for number in range(int(store.get(str(rank))))]
        everyones[rank] = b"".join(store.get(key) for key in keys)
        for key in (str(rank), *keys):
            store.delete_key(key)
    return everyones, missing


def _events(rank: int, packed: bytes) -> list[dict[str, Any]]:
    """Chrome's events of one rank, in the order in which they open and close."""
    offset_ns, spans = json.loads(zlib.decompress(packed))
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(s[0] for s in spans if not s[0].startswith("piece ")))}
    heads: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for lane, number in lanes.items():
        heads.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
    ordered: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
    for lane, name, start_ns, stop_ns, details in spans:
        # Nothing is shorter than the clock's tick, so that a span never closes before it opens.
        start, stop = start_ns + offset_ns, max(stop_ns, start_ns + 1) + offset_ns
        event = {"name": name, "pid": rank, "args": details or {}, "ts": start / 1e3}
        opens, closes = (start, 1, -stop), (stop, 0, -start)
        if lane in lanes:
            ordered.append((opens, {**event, "ph": "X", "tid": lanes[lane], "dur": (stop - start) / 1e3}))
        else:
            track = {"cat": "piece", "id": lane.removeprefix("piece "), "tid": 0}
            ordered.append((opens, {**event, **track, "ph": "b"}))
            ordered.append((closes, {"name": name, "pid": rank, "ts": stop / 1e3, **track, "ph": "e"}))
    return heads + [event for _, event in sorted(ordered, key=lambda item: item[0])]
