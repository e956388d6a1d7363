"""The stages that pieces of buckets pass: on CPU a thread each, on CUDA a stream each.

    submit: |reduce| -> |scatter| -> |gather| -> |broadcast| -> |finish| -> future
             b3          b2           b1          b0

The first stage runs in the thread that submits, since it has nothing to wait for; every other stage is one thread with
one queue. A thread waits for the phase that the stage before has started, starts the phase of its own stage, and hands
the piece on without waiting for it. So each process group is driven by one thread, in the order of submission, on every
rank, and a stage has several transfers posted at the same time: while the next stage waits for those of one piece, this
one posts those of the piece behind it. Under latency that is what fills the wire.

Rejected: to start the next phase from a callback of the backend's future. Callbacks run in whatever order transfers
end, which differs between ranks, and would pair a phase of bucket 1 here with one of bucket 2 there.

On CUDA the host waits for nothing: the submitting thread takes a piece through all stages, each on a stream of its own,
and a stream waits where on CPU a thread does. NCCL wants the collectives of all groups in one order on all ranks, which
several threads could not keep.
"""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future

from lightning_fourmin.allreduce.collectives import Transfer
from lightning_fourmin.allreduce.measure import Spans, Stamp
from lightning_fourmin.allreduce.routes import Route
from lightning_fourmin.allreduce.shared_memory import Slot
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.text import rank_list

FINISH = "finish"
"""The last stage: it waits for the last phase and completes the bucket."""
POLL_S = 0.01


class BucketInFlight:
    """A bucket from its submission until its mean is there: what DDP waits for, and how many pieces are missing.

    The main thread makes it; the thread of the last stage counts its pieces down and completes it.
    """

    def __init__(self, gradients: Tensor, index: int, route: Route, num_pieces: int, handed_over: Stamp) -> None:
        self.gradients, self.index, self.route, self.missing = gradients, index, route, num_pieces
        self.number = 0
        """Number in the engine's order."""
        self.handed_over = handed_over
        self.slot: Slot | None = None
        self.done = threading.Event()
        device = gradients.device
        self.future: Future[Tensor]
        self.ready: torch.cuda.Event | None = None
        """On CUDA: when the device has made the gradients."""
        if device.type == "cuda":
            self.ready = torch.cuda.current_stream(device).record_event()
            self.future = Future(devices=[device])
        else:
            self.future = Future()

    @property
    def result_is_shared(self) -> bool:
        """Whether finished sums stay in shared memory: DDP copies a result from whatever tensor it gets."""
        return self.slot is not None and self.slot.sums.dtype is self.gradients.dtype and self.route.after == 1.0

    def complete(self) -> None:
        """Sets the future, with whatever stands in the result by now."""
        result = self.gradients
        if self.slot is not None and self.result_is_shared:
            # DDP counts its offsets from the start of the result's storage, so the stretch needs a storage of its own.
            result = torch.from_dlpack(self.slot.sums)
        self.done.set()
        self.future.set_result(result)


class Piece:
    """A stretch of a bucket on its way through the stages; one thread at a time has it in hand."""

    def __init__(self, bucket: BucketInFlight, gradients: Tensor, slot: Slot | None, tag: int, queued: Stamp) -> None:
        self.bucket, self.gradients, self.slot, self.tag = bucket, gradients, slot, tag
        self.live = self.wire = gradients
        self.splits: list[list[Tensor]] = []
        self.stage = ""
        """The stage whose phase it is in: that of `pending` while it is waited for."""
        self.pending: Transfer | None = None
        """What the last phase has started; the next stage waits for it."""
        self.pending_stage = ""
        self.pending_since = self.queued = queued

    def where(self, topology: Topology, rank: int) -> str:
        """What this rank has the piece in, and with whom, for people."""
        algorithm = self.bucket.route.algorithm
        text = f"bucket {self.bucket.index}, phase {self.stage} of the {algorithm.name} all-reduce"
        if self.stage == FINISH:
            return text
        return f"{text} among {rank_list(algorithm.peers(self.stage, topology, rank))}"


Visit = Callable[[Piece, str, bool], None]
"""Takes a piece through a stage; the flag says whether it is the first one of the piece. It raises nothing."""


class ThreadPipeline:
    """Stages on CPU: the first in the thread that calls `start`, the others in a daemon thread each."""

    def __init__(self, stages: Sequence[str], visit: Visit, spans: Spans, at_end: Callable[[], None]) -> None:
        """`at_end` is called by the thread of the last stage when it ends: nobody uses shared memory any more."""
        self._visit, self._spans, self._at_end = visit, spans, at_end
        self._first, *rest = (*stages, FINISH)
        self._stages = rest
        self._queues: list[SimpleQueue[Piece | None]] = [SimpleQueue() for _ in rest]
        self._threads = [
            threading.Thread(target=self._run_stage, args=(i,), name=f"fourmin-{stage}", daemon=True)
            for i, stage in enumerate(rest)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, piece: Piece) -> None:
        """Takes a piece through the first stage and queues it for the second."""
        self._visit(piece, self._first, True)
        self._queues[0].put(piece)

    def close(self, deadline_s: float) -> bool:
        """Ends the threads behind the last piece; False if one is still blocked in the backend at the deadline."""
        if self._queues:
            self._queues[0].put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_stage(self, position: int) -> None:
        """The life of a thread: pieces in the order of the queue, until None comes."""
        stage = self._stages[position]
        following = self._queues[position + 1] if position + 1 < len(self._queues) else None
        with torch.no_grad():
            while (piece := self._queues[position].get()) is not None:
                start = self._spans.now()
                self._spans.add(f"piece {piece.tag}", "queue", piece.queued)
                self._visit(piece, stage, False)
                self._spans.add(stage, f"bucket {piece.bucket.index}", start, {"piece": piece.tag})
                if following is not None:
                    following.put(piece)
        if following is not None:
            following.put(None)
        else:
            self._at_end()


class StreamPipeline:
    """Stages on CUDA: a stream each, all launched by the thread that calls `start`."""

    def __init__(self, stages: Sequence[str], visit: Visit, device: torch.device) -> None:
        self._visit = visit
        self._streams = {stage: torch.cuda.Stream(device) for stage in (*stages, FINISH)}

    def start(self, piece: Piece) -> None:
        """Launches the stages that the piece has, each on its stream.

        What ties the streams together is that a stage waits for the phase before it, so a piece is prepared on the
        stream of its own first stage.
        """
        stages = (*piece.bucket.route.stages, FINISH)
        for stage in stages:
            with torch.cuda.stream(self._streams[stage]):
                self._visit(piece, stage, stage == stages[0])

    def close(self, deadline_s: float) -> bool:
        """Waits until the device is done; False if it is not at the deadline.

        A rank that stopped early may have left others in collectives that were launched.
        """
        finish = self._streams[FINISH]
        while not finish.query() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return finish.query()
