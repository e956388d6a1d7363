"""The engine behind DDP's communication hook: it carries out the plan, bucket by bucket.

`routes.py` sets the engine up, `pipeline.py` moves pieces through the stages, `measure.py` records when it does what.
This file is what happens to a piece: it is scaled and cast, passes its phases, and its mean is put where DDP finds it.

Who owns what: the thread that runs backward submits buckets, one after the other, and places them in shared memory; a
piece belongs to the stage that it is in. A lock guards `_in_flight`, the writing of `_error`, and the decision who
completes a bucket, because any stage may fail while another bucket is submitted.
"""

import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_fourmin.allreduce.measure import HandOver, InFlight, Meter, Spans
from lightning_fourmin.allreduce.pipeline import FINISH, BucketInFlight, Piece, StreamPipeline, ThreadPipeline
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.routes import Routes
from lightning_fourmin.faults.missing_ranks import MissingRanks, Wait

NUM_TAGS = 1 << 31
"""Gloo takes no larger tag."""
JOIN_S = 5.0
"""How long `close` waits for stages to end."""


class Engine:
    """All-reduces buckets of gradients to their mean over all ranks, in the order of submission.

    The strategy makes one for each fit, when DDP has wrapped the module, and registers `all_reduce_hook` with it;
    `fourmin tune` makes them to time a plan. All ranks make it together, in their main threads, and submit the same
    buckets in the same order. An error of any stage is kept, and all futures are set: an unset future would block
    backward for ever, and an exception set on a future would reach the user garbled. `raise_error` raises it as itself.
    """

    def __init__(
        self,
        plan: CommPlan,
        groups: ProcessGroups,
        device: torch.device,
        *,
        shared_bytes: int = 0,
        missing_ranks: MissingRanks | None = None,
        spans: Spans | None = None,
    ) -> None:
        """`shared_bytes` is what a step puts on the wire; shared memory of that size serves the ranks of a node.

        `missing_ranks` is told what the engine waits for until `close`, and says who has not arrived.
        """
        self.plan = plan
        self.spans = Spans(device) if spans is None else spans
        self.meter: Meter | None = None
        """The meter, once someone measures."""
        self._groups, self._device = groups, device
        # Kept for error texts, which may be made when the default group is already gone.
        self._rank = dist.get_rank()
        self._routes = Routes(plan, groups, device, shared_bytes)
        self._arena = self._routes.arena
        self._lock = threading.Lock()
        self._in_flight: set[BucketInFlight] = set()
        self._error: BaseException | None = None
        self._num_pieces = self._num_buckets = self._num_backwards = 0
        self._busy: dict[str, tuple[float, Piece]] = {}
        """The piece that each stage is busy with, and since when; the thread of `missing_ranks` reads a copy."""
        self._missing_ranks = missing_ranks
        self._pipeline: ThreadPipeline | StreamPipeline
        if device.type == "cuda":
            self._pipeline = StreamPipeline(self._routes.stages, self._visit, device)
        else:
            self._pipeline = ThreadPipeline(self._routes.stages, self._visit, self.spans, self._arena)
        if missing_ranks is not None:
            missing_ranks.watch(self)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in which this rank meets others."""
        return self._routes.stages

    def measure(self) -> Meter:
        """Makes a meter listen from the next step on, and returns it."""
        if self.meter is None:
            self.meter = Meter(self.spans)
            self.spans.listen(self.meter)
        return self.meter

    def submit(self, gradients: Tensor, index: int) -> Future[Tensor]:
        """Starts the all-reduce of a flat bucket, number `index` of its step; the future holds the mean over all ranks.

        The mean is in `gradients` or in shared memory, where it stays until the step after the next one begins.
        """
        handed_over = self.spans.device_now()
        sending = self.plan.send(gradients.numel(), gradients.dtype)
        route = self._routes.of(sending.algorithm, sending.wire_dtype)
        bucket = BucketInFlight(gradients, index, route, len(sending.numels), handed_over)
        bucket.number, self._num_buckets = self._num_buckets, self._num_buckets + 1
        self._num_backwards += index == 0
        with self._lock:
            is_sent = self._error is None and sending.num_bytes > 0 and self.plan.topology.world_size > 1
            if is_sent:
                self._in_flight.add(bucket)
        if not is_sent:
            bucket.complete()
            return bucket.future
        if self._arena is not None and "reduce" in route.phases:
            bucket.slot = self._arena.place(
                gradients.numel(), sending.wire_dtype, bucket.done.wait, new_step=index == 0
            )
        start = 0
        for numel in sending.numels:
            slot = None if bucket.slot is None else bucket.slot.narrow(start, numel)
            tag = self._num_pieces % NUM_TAGS
            with torch.no_grad():
                self._pipeline.start(Piece(bucket, gradients[start : start + numel], slot, tag, handed_over))
            start += numel
            self._num_pieces += 1
        if self.spans:
            details = {"algorithm": sending.algorithm.name, "bytes": sending.num_bytes, "pieces": len(sending.numels)}
            numbers = {"number": bucket.number, "backward": self._num_backwards, "num_bytes": sending.num_bytes}
            handed_on = self.spans.device_now()
            self.spans.tell(HandOver("main", f"bucket {index}", handed_over, handed_on, details, **numbers))
        return bucket.future

    def raise_error(self) -> None:
        """Raises the first error of a phase, as itself."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Keeps the first error and releases whoever waits for a bucket; may be called in any thread."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting = list(self._in_flight)
            self._in_flight.clear()
        for bucket in waiting:
            bucket.complete()

    def close(self) -> None:
        """Stops the stages; one that is still blocked in the backend after a bounded wait is left as a daemon."""
        if self._missing_ranks is not None:
            self._missing_ranks.forget(self)
        has_ended = self._pipeline.close(time.monotonic() + (0.0 if self._error is not None else JOIN_S))
        if self._error is not None or self._in_flight or not has_ended:
            self._groups.clean = False

    def waits(self) -> list[Wait]:
        """What each stage is doing, which may be waiting; nothing on CUDA, where NCCL's watchdog reports waits."""
        return [] if self._device.type == "cuda" else [self._wait_of(*busy) for busy in list(self._busy.values())]

    def advance(self, piece: Piece, stage: str, is_first: bool) -> None:
        """Takes a piece through one stage: waits for the phase before it and starts the stage's own."""
        if is_first:
            start = self.spans.now()
            self._prepare(piece)
            self.spans.add("main", "copy", start)
        if stage == FINISH:
            self._end_phase(piece, stage)
            self._finish(piece)
        elif stage in piece.bucket.route.phases:
            self._end_phase(piece, stage)
            piece.pending_stage, piece.pending_since = stage, self.spans.now()
            piece.pending = piece.bucket.route.phases[stage](piece)

    def _visit(self, piece: Piece, stage: str, is_first: bool) -> None:
        """Advances a piece. After an error pieces pass all stages untouched, so that the threads can end."""
        piece.stage = stage
        self._busy[stage] = (time.monotonic(), piece)
        try:
            if self._error is None:
                self.advance(piece, stage, is_first)
        except BaseException as error:
            self._explain(error, *self._busy[stage])
            self.fail(error)
        self._busy.pop(stage)
        piece.queued = self.spans.now()

    def _end_phase(self, piece: Piece, stage: str) -> None:
        """Waits for the transfer that the last phase of the piece has started, on behalf of the stage that did so."""
        if piece.pending is None:
            return
        piece.stage = piece.pending_stage
        piece.pending.wait()
        self.spans.add(f"piece {piece.tag}", piece.stage, piece.pending_since)
        self._busy[stage] = (time.monotonic(), piece)
        piece.stage = stage

    def _prepare(self, piece: Piece) -> None:
        """Scales the gradients and brings them into the wire's form."""
        route, dtype = piece.bucket.route, self.plan.wire_dtype or piece.gradients.dtype
        padding = 0
        if self._device.type == "cuda":
            assert piece.bucket.ready is not None
            torch.cuda.current_stream(self._device).wait_event(piece.bucket.ready)
            padding = -piece.gradients.numel() % route.algorithm.parts(self.plan.topology)
        if dtype is piece.gradients.dtype and not padding and piece.slot is None:
            if route.before != 1.0:
                piece.gradients.mul_(route.before)
            return
        numel = piece.gradients.numel()
        if piece.slot is not None:
            assert self._arena is not None
            wire = piece.slot.gradients[self._arena.members.index]
        elif self._device.type == "cpu":
            wire = self._routes.scratch.take(numel, dtype)
        else:
            wire = torch.empty(numel + padding, dtype=dtype, device=self._device)
            wire[numel:].zero_()
        if route.before == 1.0:
            wire[:numel].copy_(piece.gradients)
        else:
            torch.mul(piece.gradients, route.before, out=wire[:numel])
        piece.live = piece.wire = wire

    def _finish(self, piece: Piece) -> None:
        """Puts the mean where DDP finds it, and completes the bucket with its last piece."""
        bucket, numel, start = piece.bucket, piece.gradients.numel(), self.spans.now()
        if piece.slot is not None:
            if not bucket.result_is_shared:
                piece.gradients.copy_(piece.slot.sums)
        elif piece.wire is not piece.gradients:
            piece.gradients.copy_(piece.wire[:numel])
            if self._device.type == "cpu":
                self._routes.scratch.give_back(piece.wire)
            else:
                piece.wire.record_stream(torch.cuda.current_stream(self._device))
        if bucket.route.after != 1.0:
            piece.gradients.mul_(bucket.route.after)
        self.spans.add(FINISH, "copy", start)
        bucket.missing -= 1
        if bucket.missing:
            return
        with self._lock:
            # Otherwise `fail` has completed it, and a future can be set only once.
            is_waited_for = bucket in self._in_flight
            self._in_flight.discard(bucket)
        # Before the future is set, because backward may then return and the meter be read at once.
        if self.spans:
            stamps = bucket.handed_over, self.spans.device_now()
            self.spans.tell(InFlight("buckets", f"bucket {bucket.index}", *stamps, number=bucket.number))
        if is_waited_for:
            bucket.complete()

    def _explain(self, error: BaseException, since_s: float, piece: Piece) -> None:
        wait = self._wait_of(since_s, piece)
        error.add_note(f"in {wait.what}")
        if self._missing_ranks is None or self._device.type == "cuda":
            return
        if (who := self._missing_ranks.explain_wait(wait)) is not None:
            error.add_note(who)

    def _wait_of(self, since_s: float, piece: Piece) -> Wait:
        missing_rank = None if piece.pending is None else piece.pending.missing_rank
        return Wait(since_s, piece.where(self.plan.topology, self._rank), missing_rank)


def all_reduce_hook(engine: Engine, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook for DistributedDataParallel, with an engine as its state."""
    return engine.submit(bucket.buffer(), bucket.index())
