"""The engine behind the DDP hook: moves buckets through the stages of their algorithms, one thread a stage.

    hook: |reduce| -> |scatter| -> |gather| -> |broadcast| -> |finish| -> future
           b3          b2           b1          b0

A stage waits for what the stage before it started, does the local sums, starts its own collective and hands the piece
on without waiting. The first stage has nothing to wait for and runs in the thread that calls the hook. Every rank
passes every piece through every stage in the same order, so each process group sees one order, driven by one thread;
the phases of different buckets, and of the pieces of a large one, overlap.

On CUDA the host waits for nothing: the hook takes a piece through all stages, each on a stream of its own. NCCL wants
the collectives of all groups in one order on all ranks, which several threads could not keep.
"""

import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_fourmin.allreduce.algorithms import STAGES, Route, build_route
from lightning_fourmin.allreduce.collectives import (
    BackendCollectives,
    Collectives,
    MessageCollectives,
    Scratch,
    SharedCollectives,
)
from lightning_fourmin.allreduce.in_flight import BucketUnderWay, Piece
from lightning_fourmin.allreduce.meter import Meter
from lightning_fourmin.allreduce.predivide import scales
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.shared_memory import SharedArena
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.allreduce.trace import Trace, now_ns
from lightning_fourmin.faults.missing_ranks import MissingRanks, Wait
from lightning_fourmin.notes import add_note

WHOLE_BYTES = 32 * 1024
"""A stretch of up to this size crosses between nodes in one exchange instead of two."""
NUM_TAGS = 1 << 31
"""Gloo takes no larger tag."""
JOIN_S = 5.0
POLL_S = 0.01


class Engine:
    """All-reduces buckets of gradients to their mean over all ranks, in the order of submission."""

    def __init__(
        self,
        topology: Topology,
        table: AllReduceTable,
        groups: ProcessGroups,
        device: torch.device,
        wire_dtype: torch.dtype | None = None,
        predivide: float | None = None,
        shared_bytes: int = 0,
        missing_ranks: MissingRanks | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`shared_bytes`: what a step puts on the wire; shared memory of that size serves the ranks of a node.

        `missing_ranks` is told what the engine waits for until `close`, and says who has not arrived.
        """
        self.topology, self.table, self.wire_dtype = topology, table, wire_dtype
        self.meter: Meter | None = None
        """Set it to measure; it may be set at any time between steps."""
        self._groups, self._device, self._predivide = groups, device, predivide
        # To say what went wrong when the default group is already gone.
        self._rank = dist.get_rank()
        self._scratch = Scratch()
        self._arena = self._open_arena(shared_bytes)
        self._inside: Collectives = BackendCollectives()
        self._between: Collectives = BackendCollectives()
        if device.type == "cpu":
            self._between = MessageCollectives(self._scratch, WHOLE_BYTES)
            self._inside = MessageCollectives(self._scratch)
            if self._arena is not None:
                self._inside = SharedCollectives(self._scratch, self._arena)
        self._routes: dict[torch.dtype, Mapping[str, Route]] = {}
        # Makes the groups, in the main thread of every rank; routes for other dtypes find them made.
        routes = self._routes_for(wire_dtype or torch.float32)
        self._stages = [s for s in STAGES if any(s in route.phases for route in routes.values())]
        on_cuda = device.type == "cuda"
        self._streams = {stage: torch.cuda.Stream(device) for stage in (*self._stages, "finish") if on_cuda}
        in_threads = [] if on_cuda else [*self._stages[1:], "finish"]
        self._queues: list[SimpleQueue[Piece | None]] = [SimpleQueue() for _ in in_threads]
        self._lock = threading.Lock()
        self._under_way: set[BucketUnderWay] = set()
        self._error: BaseException | None = None
        self._num_pieces = 0
        self._held: list[Piece] = []
        self._trace = trace
        self._busy: dict[str, tuple[float, Piece]] = {}
        self._missing_ranks = missing_ranks
        self._threads = [
            threading.Thread(target=self._run_stage, args=(stage, i), name=f"fourmin-{stage}", daemon=True)
            for i, stage in enumerate(in_threads)
        ]
        for thread in self._threads:
            thread.start()
        if missing_ranks is not None:
            missing_ranks.watch(self)

    def submit(self, gradients: Tensor, index: int, is_last: bool = True) -> Future[Tensor]:
        """Starts the all-reduce of a flat bucket, number `index` of its step; the future holds the mean over all ranks.

        Where the meter wants computing undisturbed, it starts with the last bucket of the step.

        The mean stands in `gradients` or in shared memory; there it holds until the step after the next one begins.
        """
        start_ns = now_ns()
        wire_dtype = self.wire_dtype or gradients.dtype
        num_bytes = gradients.numel() * wire_dtype.itemsize
        route = self._routes_for(wire_dtype)[self.table.choose(num_bytes)]
        num_pieces = self.table.num_pieces(route.algorithm, num_bytes)
        bucket = BucketUnderWay(gradients, index, route, num_pieces)
        if self.meter is not None:
            bucket.times = self.meter.hand_over(index, num_bytes)
        with self._lock:
            is_sent = self._error is None and num_bytes > 0 and self.topology.world_size > 1
            if is_sent:
                self._under_way.add(bucket)
        if not is_sent:
            bucket.complete()
            if is_last:
                self._start_held(bucket)
            return bucket.future
        if self._arena is not None and "reduce" in route.phases:
            bucket.slot = self._arena.place(gradients.numel(), wire_dtype, bucket.done.wait, new_step=index == 0)
        start = 0
        for stretch in gradients.tensor_split(num_pieces):
            slot = None if bucket.slot is None else bucket.slot.narrow(start, stretch.numel())
            self._held.append(Piece(bucket, stretch, slot, tag=self._num_pieces % NUM_TAGS))
            start += stretch.numel()
            self._num_pieces += 1
        if is_last or self.meter is None or not self.meter.undisturbed:
            self._start_held(bucket)
        if self._trace is not None:
            details = {"algorithm": route.algorithm, "bytes": num_bytes, "pieces": num_pieces}
            self._trace.add("main", f"bucket {index}", start_ns, details)
        if self.meter is not None and bucket.times is not None:
            bucket.times.handed_on = self.meter.stamp()
        return bucket.future

    def _start_held(self, newest: BucketUnderWay) -> None:
        for piece in self._held:
            piece.bucket.ready = newest.ready
            with torch.no_grad():
                if self._streams:
                    self._launch(piece)
                else:
                    self._pass(piece, self._stages[0], first=True)
                    self._queues[0].put(piece)
        self._held = []

    def _launch(self, piece: Piece) -> None:
        """On CUDA: the stages that the piece has, each on its stream.

        What ties streams together is that a stage waits for the phase before it, so a piece is prepared on the stream
        of its own first stage.
        """
        stages = [*piece.bucket.route.stages, "finish"]
        for stage in stages:
            with torch.cuda.stream(self._streams[stage]):
                self._pass(piece, stage, first=stage == stages[0])

    def raise_error(self) -> None:
        """Raises the first error of a phase, as itself."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Keeps the first error and releases whoever waits: an unset future would block backward for ever."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting = list(self._under_way)
            self._under_way.clear()
        for bucket in waiting:
            bucket.complete()

    def close(self) -> None:
        """Stops the threads; one that is still blocked in the backend after a bounded wait is left as a daemon."""
        if self._missing_ranks is not None:
            self._missing_ranks.forget(self)
        if self._queues:
            self._queues[0].put(None)
        deadline = time.monotonic() + (0.0 if self._error is not None else JOIN_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # On CUDA a rank that stopped early may have left others in collectives that were launched.
        finish = self._streams.get("finish")
        while finish is not None and not finish.query() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        still_running = any(thread.is_alive() for thread in self._threads) or not (finish is None or finish.query())
        if self._error is not None or self._under_way or still_running:
            self._groups.clean = False

    def _open_arena(self, shared_bytes: int) -> SharedArena | None:
        """Shared memory for the ranks of this rank's group, if they are on one node and the table uses groups."""
        if self._device.type != "cpu" or not shared_bytes or self.table.algorithms == ("ring",):
            return None
        members = self._groups.members("reduce", self.topology.groups)
        if members is None or len({self.topology.node_of[rank] for rank in members.ranks}) > 1:
            return None
        # Twice what a step needs: DDP still copies results of a step out of its half while the next one begins.
        return SharedArena.open(
            members, 2 * shared_bytes + self.table.chunk_bytes, self._groups.timeout.total_seconds()
        )

    def _routes_for(self, wire_dtype: torch.dtype) -> Mapping[str, Route]:
        if wire_dtype not in self._routes:
            routes = {}
            for name in self.table.algorithms:
                local_sums = name != "ring" and self._device.type == "cpu"
                factors = scales(self.topology, wire_dtype, self._predivide, local_sums)
                routes[name] = build_route(name, self.topology, self._groups, self._inside, self._between, factors)
            self._routes[wire_dtype] = routes
        return self._routes[wire_dtype]

    def _run_stage(self, stage: str, position: int) -> None:
        with torch.no_grad():
            while (piece := self._queues[position].get()) is not None:
                start_ns = now_ns()
                if self._trace is not None:
                    self._trace.add(f"piece {piece.tag}", "queue", piece.queued_ns)
                self._pass(piece, stage, first=False)
                if self._trace is not None:
                    self._trace.add(stage, f"bucket {piece.bucket.index}", start_ns, {"piece": piece.tag})
                if stage != "finish":
                    self._queues[position + 1].put(piece)
            if stage != "finish":
                self._queues[position + 1].put(None)
            elif self._arena is not None:
                # The last of the threads: nobody uses it any more.
                self._arena.close()

    def _pass(self, piece: Piece, stage: str, first: bool) -> None:
        """Takes a piece through one stage, its first one or a later one; an error ends the engine's work."""
        piece.phase = stage
        self._busy[stage] = (time.monotonic(), piece)
        try:
            if self._error is None:
                self._advance(piece, stage, first)
        except BaseException as error:
            self._explain(error, *self._busy[stage])
            self.fail(error)
        self._busy.pop(stage)
        piece.queued_ns = now_ns()

    def _explain(self, error: BaseException, since_s: float, piece: Piece) -> None:
        wait = self._wait_of(since_s, piece)
        add_note(error, f"in {wait.what}")
        if self._missing_ranks is None or self._streams:
            return
        if (who := self._missing_ranks.explain_wait(wait)) is not None:
            add_note(error, who)

    def waits(self) -> list[Wait]:
        """What the stages are doing; on CUDA nothing of it waits, and NCCL's watchdog speaks there."""
        return [] if self._streams else [self._wait_of(*busy) for busy in list(self._busy.values())]

    def _wait_of(self, since_s: float, piece: Piece) -> Wait:
        missing_rank = None if piece.pending is None else piece.pending.missing_rank
        return Wait(since_s, piece.where(self.topology, self._rank), missing_rank)

    def _advance(self, piece: Piece, stage: str, first: bool) -> None:
        start_ns = now_ns()
        if first:
            self._prepare(piece)
            if self._trace is not None:
                self._trace.add("main", "copy", start_ns)
        if stage == "finish":
            self._end_phase(piece, stage)
            self._finish(piece)
        elif stage in piece.bucket.route.phases:
            self._end_phase(piece, stage)
            piece.pending_phase, piece.pending_ns = stage, now_ns()
            piece.pending = piece.bucket.route.phases[stage](piece)

    def _end_phase(self, piece: Piece, stage: str) -> None:
        """Waits for what the last phase of the piece has started."""
        if piece.pending is None:
            return
        piece.phase = piece.pending_phase
        piece.pending.wait()
        if self._trace is not None:
            self._trace.add(f"piece {piece.tag}", piece.phase, piece.pending_ns)
        self._busy[stage] = (time.monotonic(), piece)
        piece.phase = stage

    def _prepare(self, piece: Piece) -> None:
        """Scales the gradients and brings them into the wire's form."""
        before, dtype = piece.bucket.route.before, self.wire_dtype or piece.gradients.dtype
        padding = 0
        if self._device.type == "cuda":
            assert piece.bucket.ready is not None
            torch.cuda.current_stream(self._device).wait_event(piece.bucket.ready)
            if piece.bucket.route.algorithm == "torus":
                padding = -piece.gradients.numel() % self.topology.largest_group
        if dtype is piece.gradients.dtype and not padding and piece.slot is None:
            if before != 1.0:
                piece.gradients.mul_(before)
            return
        numel = piece.gradients.numel()
        if piece.slot is not None:
            assert self._arena is not None
            wire = piece.slot.gradients[self._arena.members.index]
        elif self._device.type == "cpu":
            wire = self._scratch.take(numel, dtype)
        else:
            wire = torch.empty(numel + padding, dtype=dtype, device=self._device)
            wire[numel:].zero_()
        if before == 1.0:
            wire[:numel].copy_(piece.gradients)
        else:
            torch.mul(piece.gradients, before, out=wire[:numel])
        piece.live = piece.wire = wire

    def _finish(self, piece: Piece) -> None:
        bucket, numel, start_ns = piece.bucket, piece.gradients.numel(), now_ns()
        if piece.slot is not None:
            if not bucket.result_is_shared:
                piece.gradients.copy_(piece.slot.sums)
        elif piece.wire is not piece.gradients:
            piece.gradients.copy_(piece.wire[:numel])
            if self._device.type == "cpu":
                self._scratch.give_back(piece.wire)
            else:
                piece.wire.record_stream(torch.cuda.current_stream(self._device))
        if bucket.route.after != 1.0:
            piece.gradients.mul_(bucket.route.after)
        if self._trace is not None:
            self._trace.add("finish", "copy", start_ns)
        bucket.missing -= 1
        if bucket.missing == 0:
            with self._lock:
                waited_for = bucket in self._under_way
                self._under_way.discard(bucket)
            if self.meter is not None and bucket.times is not None:
                bucket.times.done = self.meter.stamp()
            if waited_for:
                bucket.complete()


def all_reduce_hook(engine: Engine, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook for DistributedDataParallel, with an engine as its state."""
    return engine.submit(bucket.buffer(), bucket.index(), bucket.is_last())
