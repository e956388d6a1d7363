"""Spans of time on one rank, written as a Chrome trace (opens in Perfetto or chrome://tracing)."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_fourmin.files import write_whole


class Trace:
    """Spans by lane; appending is all that happens while training runs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spans: list[tuple[str, str, int, int, dict[str, object]]] = []

    @contextmanager
    def span(self, lane: str, name: str, **details: object) -> Iterator[None]:
        start = time.time_ns()
        try:
            yield
        finally:
            self._spans.append((lane, name, start, time.time_ns(), details))

    def write(self, folder: Path) -> Path:
        """Writes `rank<N>.json`, complete or not at all."""
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span[0] for span in self._spans))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        ]
        for lane, number in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": self._rank, "tid": number, "args": {"name": lane}})
        for lane, name, start, stop, details in self._spans:
            event = {"ph": "X", "name": name, "pid": self._rank, "tid": lanes[lane], "args": details}
            events.append({**event, "ts": start / 1e3, "dur": (stop - start) / 1e3})
        path = folder / f"rank{self._rank}.json"
        write_whole(path, json.dumps({"traceEvents": events}))
        return path
