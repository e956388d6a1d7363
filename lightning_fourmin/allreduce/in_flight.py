"""Buckets and their pieces while the engine moves them through its stages."""

import threading

import torch
from torch import Tensor
from torch.futures import Future

from lightning_fourmin.allreduce.algorithms import Route, phase_ranks
from lightning_fourmin.allreduce.collectives import Transfer
from lightning_fourmin.allreduce.meter import BucketTimes
from lightning_fourmin.allreduce.shared_memory import Slot
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.text import rank_list


class BucketUnderWay:
    """A bucket under way: what DDP waits for, and how many pieces are still missing."""

    def __init__(self, gradients: Tensor, index: int, route: Route, num_pieces: int) -> None:
        self.gradients, self.index, self.route, self.missing = gradients, index, route, num_pieces
        self.slot: Slot | None = None
        self.times: BucketTimes | None = None
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
        """DDP copies the result out of whatever tensor it gets: sums that need no more work can stay where they are."""
        return self.slot is not None and self.slot.sums.dtype is self.gradients.dtype and self.route.after == 1.0

    def complete(self) -> None:
        result = self.gradients
        if self.slot is not None and self.result_is_shared:
            # DDP counts its offsets from the start of the result's storage, so the stretch needs a storage of its own.
            result = torch.from_dlpack(self.slot.sums)
        self.done.set()
        self.future.set_result(result)


class Piece:
    """A stretch of a bucket on its way through the stages."""

    def __init__(self, bucket: BucketUnderWay, gradients: Tensor, slot: Slot | None, tag: int) -> None:
        self.bucket, self.gradients, self.slot, self.tag = bucket, gradients, slot, tag
        self.live = self.wire = gradients
        self.splits: list[list[Tensor]] = []
        self.pending: Transfer | None = None
        self.phase = ""
        """The phase that it is in: the one that `pending` is of, once that is waited for."""
        self.pending_phase, self.pending_ns, self.queued_ns = "", 0, 0

    def where(self, topology: Topology, rank: int) -> str:
        """What this rank has it in, and with whom, for people."""
        algorithm = self.bucket.route.algorithm
        text = f"bucket {self.bucket.index}, phase {self.phase} of the {algorithm} all-reduce"
        if self.phase == "finish":
            return text
        return f"{text} among {rank_list(phase_ranks(algorithm, self.phase, topology, rank))}"
