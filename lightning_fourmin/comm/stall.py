"""Says so when a phase of an all-reduce waits long, while it still waits."""

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger(__name__)


class Wait(NamedTuple):
    """Something that a stage is doing, which may be waiting."""

    since_s: float
    """On the monotonic clock."""
    what: str
    missing_rank: int | None
    """The rank that it waits for, None where it is not known."""


class StallWatch:
    """A thread that looks at what the stages wait for and warns once for each wait beyond the limit."""

    def __init__(self, limit_s: float, waits: Callable[[], list[Wait]]) -> None:
        self._limit_s, self._waits = limit_s, waits
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fourmin-stall-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        warned: set[tuple[float, str]] = set()
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            waits = {wait[:2]: wait.missing_rank for wait in self._waits()}
            warned.intersection_update(waits)
            for (since_s, what), rank in waits.items():
                if time.monotonic() - since_s > self._limit_s and (since_s, what) not in warned:
                    warned.add((since_s, what))
                    who = "another rank" if rank is None else f"rank {rank}"
                    log.warning(
                        "%s has waited for %s for more than %g s: is it slow or stopped?", what, who, self._limit_s
                    )
