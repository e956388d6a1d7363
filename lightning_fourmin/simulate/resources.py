"""The resources that the parts of a step share: links, the gaps that other phases leave on a link, and cores.

All times are seconds from the start of the step.
"""


class Wire:
    """A link that carries one phase at a time, in the order of the calls of `carry`."""

    def __init__(self) -> None:
        self.free_s = 0.0
        """When the last phase is over."""
        self.busy: list[tuple[float, float]] = []
        """Start and end of each phase, in order."""

    def carry(self, at_s: float, took_s: float) -> tuple[float, float]:
        """Start and end of a phase that is ready at `at_s`."""
        start_s = max(at_s, self.free_s)
        self.free_s = start_s + took_s
        self.busy.append((start_s, self.free_s))
        return start_s, self.free_s


class Gaps:
    """The time that is left on a link between the phases that it carries already, which take precedence."""

    def __init__(self, wire: Wire) -> None:
        self._busy, self._next, self._free_s = wire.busy, 0, 0.0

    def carry(self, at_s: float, took_s: float) -> tuple[float, float]:
        """Start and end of a phase that is ready at `at_s` and pauses while the link carries the others.

        Calls come in the order of the phases: each starts after the one before it has ended.
        """
        now_s = max(at_s, self._free_s)
        begun_s: float | None = None
        while self._next < len(self._busy):
            busy_from_s, busy_to_s = self._busy[self._next]
            if busy_to_s > now_s:
                if now_s + took_s <= busy_from_s:
                    break
                if busy_from_s > now_s:
                    # A part of the phase fits into this gap.
                    begun_s = now_s if begun_s is None else begun_s
                    took_s -= busy_from_s - now_s
                now_s = busy_to_s
            self._next += 1
        self._free_s = now_s + took_s
        return (now_s if begun_s is None else begun_s), self._free_s


class Cores:
    """Cores that compute, and do so more slowly while they serve communication, too."""

    def __init__(self) -> None:
        self._now_s = self._done_s = 0.0
        """A point in time, and the seconds of the step's own work that are done by then."""
        self._shares: list[tuple[float, float, float]] = []
        """Start and end of what is served, and the share of the cores that it takes."""
        self._next = 0

    def serve(self, start_s: float, end_s: float, work_s: float) -> None:
        """Gives communication `work_s` seconds of the time from `start_s` to `end_s`, at most all of that time."""
        if end_s > start_s:
            self._shares.append((start_s, end_s, min(1.0, work_s / (end_s - start_s))))

    def reach(self, work_s: float) -> float:
        """The time at which `work_s` seconds of the step's own work are done; `work_s` must not fall between calls."""
        while self._next < len(self._shares) and self._done_s < work_s:
            start_s, end_s, share = self._shares[self._next]
            free_s = max(0.0, start_s - self._now_s)
            if self._done_s + free_s >= work_s:
                break
            self._done_s += free_s
            self._now_s = max(self._now_s, start_s)
            slowed_s = (1 - share) * (end_s - self._now_s) if end_s > self._now_s else 0.0
            if self._done_s + slowed_s >= work_s and share < 1:
                self._now_s += (work_s - self._done_s) / (1 - share)
                self._done_s = work_s
                return self._now_s
            self._done_s += slowed_s
            self._now_s = max(self._now_s, end_s)
            self._next += 1
        self._now_s += max(0.0, work_s - self._done_s)
        self._done_s = max(self._done_s, work_s)
        return self._now_s
