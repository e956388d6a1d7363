"""The stages that pieces of buckets pass: on CPU a thread each, on CUDA a stream each.

    submit: |reduce| -> |scatter| -> |gather| -> |broadcast| -> |finish| -> future
             b3          b2           b1          b0

The first stage runs in the thread that submits, since it has nothing to wait for; every other stage is one thread with
one queue. A thread waits for the phase that the stage before has started, starts the phase of its own stage, and hands
the piece on without waiting for that phase. So on every rank one thread uses each process group, in the order of
submission. A stage also has several transfers posted at the same time: while the next stage waits for those of one
piece, this one posts those of the piece behind it. Where messages take long to arrive, that keeps the wire busy.

Rejected: to start the next phase from a callback of the backend's future. Callbacks run in the order in which transfers
end. It differs between ranks, so a phase of bucket 1 on one rank would be paired with one of bucket 2 on another.

On CUDA the host does not wait: the submitting thread takes a piece through all stages, each on a stream of its own, and
a stream waits where a thread does on CPU. NCCL wants the collectives of all groups in one order on all ranks, which
several threads could not keep.
"""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future

from lightning_fourmin.allreduce.collectives import Transfer
from lightning_fourmin.allreduce.measure import Spans, Stamp
from lightning_fourmin.allreduce.routes import Route
from lightning_fourmin.allreduce.shared_memory import SharedArena, Slot
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
        device, is_cuda = gradients.device, gradients.is_cuda
        self.future: Future[Tensor] = Future(devices=[device] if is_cuda else None)
        self.ready = torch.cuda.current_stream(device).record_event() if is_cuda else None
        """On CUDA: when the device has made the gradients."""

    @property
    def result_is_shared(self) -> bool:
        """Whether finished sums stay in shared memory: DDP takes the result from any tensor, so no copy is needed."""
        return self.slot is not None and self.slot.sums.dtype is self.gradients.dtype and self.route.after == 1.0

    def complete(self) -> None:
        """Sets the future, also after an error: the result then holds whatever has been written to it."""
        result = self.gradients
        if self.slot is not None and self.result_is_shared:
            # DDP counts its offsets from the start of the result's storage, so the stretch needs a storage of its own.
            result = torch.from_dlpack(self.slot.sums)
        self.done.set()
        self.future.set_result(result)


class Piece:
    """A stretch of a bucket on its way through the stages; only the thread of its current stage may touch it."""

    def __init__(self, bucket: BucketInFlight, gradients: Tensor, slot: Slot | None, tag: int, queued: Stamp) -> None:
        self.bucket, self.gradients, self.slot, self.tag = bucket, gradients, slot, tag
        self.live = self.wire = gradients
        self.splits: list[list[Tensor]] = []
        self.stage = ""
        """The stage whose phase the piece is in; while a stage waits for `pending`, the stage that started it."""
        self.pending: Transfer | None = None
        """What the last phase has started; the next stage waits for it."""
        self.pending_stage = ""
        self.pending_since = self.queued = queued

    def where(self, topology: Topology, rank: int) -> str:
        """For people: the phase that the piece is in, and the ranks that take part in it."""
        algorithm = self.bucket.route.algorithm
        text = f"bucket {self.bucket.index}, phase {self.stage} of the {algorithm.name} all-reduce"
        if self.stage == FINISH:
            return text
        return f"{text} among {rank_list(algorithm.peers(self.stage, topology, rank))}"


Queue = SimpleQueue[Piece | None]
"""Pieces for a stage; None ends its thread."""
Visit = Callable[[Piece, str, bool], None]
"""Takes a piece through a stage; the flag says whether it is the first stage of the piece. It never raises."""


class ThreadPipeline:
    """Stages on CPU: the first in the thread that calls `start`, the others in a daemon thread each."""

    def __init__(self, stages: Sequence[str], visit: Visit, spans: Spans, arena: SharedArena | None) -> None:
        """The thread of the last stage closes the `arena` when it ends, because no stage uses it any more."""
        self._visit, self._spans, self._arena = visit, spans, arena
        self._first, *rest = (*stages, FINISH)
        self._queues: list[Queue] = [SimpleQueue() for _ in rest]
        self._threads = [
            threading.Thread(target=self._run_stage, args=(stage, *queues), name=f"fourmin-{stage}", daemon=True)
            for stage, *queues in zip_longest(rest, self._queues, self._queues[1:])
        ]
        for thread in self._threads:
            thread.start()

    def start(self, piece: Piece) -> None:
        """Takes a piece through the first stage and queues it for the second."""
        self._visit(piece, self._first, True)
        self._queues[0].put(piece)

    def close(self, deadline_s: float) -> bool:
        """Ends the threads after the last piece; False if one is still blocked in the backend at the deadline."""
        if self._queues:
            self._queues[0].put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_stage(self, stage: str, queue: Queue, following: Queue | None) -> None:
        """The life of a thread: it takes pieces in the order of its queue, until None comes."""
        with torch.no_grad():
            while (piece := queue.get()) is not None:
                start = self._spans.now()
                self._spans.add(f"piece {piece.tag}", "queue", piece.queued)
                self._visit(piece, stage, False)
                self._spans.add(stage, f"bucket {piece.bucket.index}", start, {"piece": piece.tag})
                if following is not None:
                    following.put(piece)
        if following is not None:
            following.put(None)
        elif self._arena is not None:
            self._arena.close()


class StreamPipeline:
    """Stages on CUDA: a stream each, all launched by the thread that calls `start`."""

    def __init__(self, stages: Sequence[str], visit: Visit, device: torch.device) -> None:
        self._visit = visit
        self._streams = {stage: torch.cuda.Stream(device) for stage in (*stages, FINISH)}

    def start(self, piece: Piece) -> None:
        """Launches the stages of the piece, each on its stream.

        Only the wait of a stage for the phase before it keeps the streams in order, so a piece has to be prepared on
        the stream of its first stage.
        """
        stages = (*piece.bucket.route.phases, FINISH)
        for stage in stages:
            with torch.cuda.stream(self._streams[stage]):
                self._visit(piece, stage, stage == stages[0])

    def close(self, deadline_s: float) -> bool:
        """Waits until the device is done; False if it is not done at the deadline.

        There is a deadline because a rank that stopped early may have left others in collectives that were launched.
        """
        finish = self._streams[FINISH]
        while not finish.query() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return finish.query()
