"""Says so when a phase of an all-reduce waits long, while it still waits."""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class StallWatch:
    """A thread that looks at what the stages wait for and warns once for each wait beyond the limit."""

    def __init__(self, limit_s: float, waits: Callable[[], list[tuple[float, str]]]) -> None:
        """`waits` lists what is being waited for: since when (monotonic clock), and what, in words."""
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
            waits = self._waits()
            warned.intersection_update(waits)
            for since, what in waits:
                if time.monotonic() - since > self._limit_s and (since, what) not in warned:
                    warned.add((since, what))
                    log.warning(
                        "%s has waited for more than %g s: is another rank slow or stopped?", what, self._limit_s
                    )
