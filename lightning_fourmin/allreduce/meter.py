"""What communication costs a step, from the times at which buckets are handed over and done.

main thread   backward ....|b0|......|b1|....|b2|  waits      optimizer
buckets                     [0 ........]  [1 .......]
                                              [2 ............]
exposed                     ==        ==      ===============      time in which the main thread cannot compute
communication               =================================      time in which any bucket is under way
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

Stamp = float | torch.cuda.Event
"""A moment: seconds of the host's clock on CPU; on CUDA an event, since the host runs ahead of the device."""


@dataclass
class BucketTimes:
    """A bucket's way: handed over by backward, handed on by the main thread, done."""

    backward: int
    """Number of the backward pass that it belongs to."""
    num_bytes: int
    handed_over: Stamp
    handed_on: Stamp | None = None
    done: Stamp | None = None


class Communication(NamedTuple):
    """What the buckets of one training step took."""

    exposed_s: float
    busy_s: float
    num_bytes: int


class Meter:
    """Keeps the times of buckets from one `take` to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buckets: list[BucketTimes] = []
        self._num_backwards = 0
        self._waits: list[tuple[Stamp, Stamp]] = []
        self.undisturbed = False
        """Set between steps: the buckets of the next one wait for its last, so that nothing disturbs computing."""
        self.paused = False
        """Set while something runs that is no part of a step."""

    def stamp(self) -> Stamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hand_over(self, index: int, num_bytes: int) -> BucketTimes:
        """Backward has made bucket number `index` ready."""
        self._num_backwards += index == 0
        times = BucketTimes(self._num_backwards, num_bytes, self.stamp())
        self._buckets.append(times)
        return times

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around anything else that makes the main thread wait for other ranks; on CUDA, its stream."""
        if self.paused:
            yield
            return
        start = self.stamp()
        try:
            yield
        finally:
            self._waits.append((start, self.stamp()))

    def take(self) -> "TakenTimes":
        """The times since the last call, once backward has returned."""
        taken = TakenTimes(tuple(self._buckets), tuple(self._waits))
        self._buckets, self._waits = [], []
        return taken


@dataclass(frozen=True)
class TakenTimes:
    """Times of a step; on CUDA `communication` waits until the device has come past them."""

    buckets: tuple[BucketTimes, ...]
    waits: tuple[tuple[Stamp, Stamp], ...]

    def communication(self) -> Communication:
        exposed_s, busy_s, busy_until = sum(_seconds_after(*wait) for wait in self.waits), 0.0, float("-inf")
        done = [bucket for bucket in self.buckets if bucket.handed_on is not None and bucket.done is not None]
        origin = done[0].handed_over if done else 0.0
        for _, backward in groupby(done, key=lambda bucket: bucket.backward):
            spans = [
                [_seconds_after(origin, moment) for moment in (times.handed_over, times.handed_on, times.done)]
                for times in backward
            ]
            exposed_s += sum(handed_on - handed_over for handed_over, handed_on, _ in spans[:-1])
            exposed_s += spans[-1][2] - spans[-1][0]
            for handed_over, _, end in spans:
                busy_s += max(0.0, end - max(handed_over, busy_until))
                busy_until = max(busy_until, end)
        return Communication(exposed_s, busy_s, sum(bucket.num_bytes for bucket in done))


def _seconds_after(origin: Stamp, moment: Stamp | None) -> float:
    if isinstance(moment, torch.cuda.Event):
        assert isinstance(origin, torch.cuda.Event)
        moment.synchronize()
        return 1e-3 * float(origin.elapsed_time(moment))
    assert isinstance(origin, float)
    assert isinstance(moment, float)
    return moment - origin
