"""The collectives that algorithms are made of; each is started without waiting.

gloo's own reduce-scatter moves twice the bytes that are needed, and its FP16 sums round at every hop. So on CPU each
collective is one exchange: every member gives each other member just what that one needs, and adds up what it gets
itself, in FP32. Exchanges cross between nodes as messages and inside a node through shared memory. On CUDA the
backend's own collectives run.

A collective is started by the thread of one stage and waited for by the thread of the next; the object that is waited
for is a `Transfer`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_fourmin.allreduce.process_groups import Members
from lightning_fourmin.allreduce.shared_memory import SharedArena, Slot


class Waitable(Protocol):
    """What can be waited for: a message of the backend, or a signal through a pipe."""

    def wait(self) -> object:
        """Blocks until it is there."""
        ...


Awaited = Sequence[tuple[int | None, Waitable]]
"""What a transfer waits for, each with the rank at its other end; None where that is everyone."""


class Transfer:
    """A started collective: `wait` blocks until it is done (on CUDA: makes the stream wait) and does the local sums."""

    def __init__(self, awaited: Awaited, then: Callable[[], object] | None = None) -> None:
        self._awaited, self._then = awaited, then
        self.missing_rank: int | None = None
        """The rank that `wait` is waiting for right now."""

    def wait(self) -> None:
        """Waits for all messages and signals, then does what this rank has left to do, such as the local sums."""
        for rank, waitable in self._awaited:
            self.missing_rank = rank
            waitable.wait()
        self.missing_rank = None
        if self._then is not None:
            self._then()


class Payload(Protocol):
    """What a collective works on: a piece of a bucket. The threads of the stages hand it on; one at a time has it."""

    tag: int
    """Number of the piece, the same on all ranks: a message can only meet its own."""
    slot: Slot | None
    """The piece's stretch of the node's shared memory."""
    live: Tensor
    """The stretch that this rank works on, in the wire's dtype: its gradients at first, later the sums it holds."""
    splits: list[list[Tensor]]
    """The parts that `live` was cut from at each reduce-scatter, outermost first."""


class Collectives(ABC):
    """One way to run the collectives; `scale` multiplies a sum before it is rounded to the wire's dtype."""

    has_halves: ClassVar[bool]
    """Whether an all-reduce between groups runs as reduce-scatter and all-gather, so that it has halves."""

    @abstractmethod
    def reduce(self, payload: Payload, members: Members, scale: float) -> Transfer:
        """Leaves the sum with the leader."""

    @abstractmethod
    def broadcast(self, payload: Payload, members: Members) -> Transfer:
        """Gives everyone what the leader has."""

    @abstractmethod
    def reduce_scatter(self, payload: Payload, members: Members, scale: float) -> Transfer:
        """Leaves each member with the sum of its part, as `payload.live`."""

    @abstractmethod
    def all_gather(self, payload: Payload, members: Members) -> Transfer:
        """Gives everyone the parts of all members: the inverse of `reduce_scatter`."""

    def enter_leader(self, payload: Payload, members: Members) -> None:
        """Brings a fresh payload to where `reduce` would have left it, without sending anything."""
        return  # with messages and with the backend the sum stays where the payload is

    def enter_part(self, payload: Payload, members: Members) -> None:
        """Brings a fresh payload to where `reduce_scatter` would have left it, without sending anything."""
        _cut(payload, members)


class Scratch:
    """Memory that is reused from step to step, because fresh memory costs a page fault every 4 KB.

    Stages share it without a lock: taking and giving back are single operations of a deque.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], deque[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of that size with any content."""
        try:
            return self._free[numel, dtype].pop()
        except (KeyError, IndexError):
            return torch.empty(numel, dtype=dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Lets a tensor from `take` be taken again."""
        self._free.setdefault((tensor.numel(), tensor.dtype), deque()).append(tensor)

    def add_up(self, terms: Sequence[Tensor], scale: float, out: Tensor) -> None:
        """Sets `out` to scale * the sum of the terms in their order, summed in at least FP32; `out` may be a term."""
        first, second, *rest = terms
        in_place = out.dtype.itemsize >= 4 and not any(term is out for term in rest)
        total = out if in_place else self.take(out.numel(), max(out.dtype, torch.float32, key=lambda d: d.itemsize))
        if total.dtype is first.dtype:
            torch.add(first, second, out=total)
        else:
            total.copy_(first).add_(second)
        for term in rest:
            total.add_(term)
        if scale != 1.0:
            total.mul_(scale)
        if not in_place:
            out.copy_(total)
            self.give_back(total)


class MessageCollectives(Collectives):
    """Messages from member to member, for CPU tensors on gloo."""

    has_halves = True

    def __init__(self, scratch: Scratch, whole_bytes: int = 0) -> None:
        """Reduce-scatter sends payloads of up to `whole_bytes` whole to all: more bytes, but no all-gather after it.

        Its sum then has no single owner, so a payload cannot enter the second half by itself: a transport whose halves
        run apart has `whole_bytes=0`.
        """
        self._scratch, self._whole_bytes = scratch, whole_bytes

    @override
    def reduce(self, payload: Payload, members: Members, scale: float) -> Transfer:
        if members.index != 0:
            return Transfer(_send([(payload.live, 0)], members, payload.tag))
        return self._receive_and_add_up(payload, members, scale, [])

    @override
    def broadcast(self, payload: Payload, members: Members) -> Transfer:
        if members.index != 0:
            return Transfer(_receive([(payload.live, 0)], members, payload.tag))
        return Transfer(_send([(payload.live, other) for other in members.others], members, payload.tag))

    @override
    def reduce_scatter(self, payload: Payload, members: Members, scale: float) -> Transfer:
        if payload.live.nbytes <= self._whole_bytes:
            payload.splits.append([])
            whole = payload.live
            return self._receive_and_add_up(payload, members, scale, [(whole, other) for other in members.others])
        parts = _cut(payload, members)
        return self._receive_and_add_up(payload, members, scale, [(parts[other], other) for other in members.others])

    @override
    def all_gather(self, payload: Payload, members: Members) -> Transfer:
        parts = payload.splits.pop()
        if not parts:
            return Transfer([])
        awaited = _receive([(parts[other], other) for other in members.others], members, payload.tag)
        awaited += _send([(payload.live, other) for other in members.others], members, payload.tag)
        payload.live = _joined(parts)
        return Transfer(awaited)

    @override
    def enter_part(self, payload: Payload, members: Members) -> None:
        if self._whole_bytes:
            raise ValueError("a transport that exchanges whole pieces has no owners: give it whole_bytes=0")
        super().enter_part(payload, members)

    def _receive_and_add_up(
        self, payload: Payload, members: Members, scale: float, sends: list[tuple[Tensor, int]]
    ) -> Transfer:
        """Receives what the payload's `live` covers from every other member, sends, and adds up when all is there."""
        mine = payload.live
        inbox = {other: self._scratch.take(mine.numel(), mine.dtype) for other in members.others}
        awaited = _receive([(box, other) for other, box in inbox.items()], members, payload.tag)
        awaited += _send(sends, members, payload.tag)

        def add_up() -> None:
            # In the order of places: where everyone sums the whole, everyone must get the same bits.
            terms = [inbox.get(place, mine) for place in range(len(members.ranks))]
            self._scratch.add_up(terms, scale, out=mine)
            for box in inbox.values():
                self._scratch.give_back(box)

        return Transfer(awaited, add_up)


class SharedCollectives(MessageCollectives):
    """Collectives through shared memory: pipes signal that an area is ready. Pieces without a slot go as messages.

    `inward` pipes carry "my gradients are there", `outward` pipes "the sums are there". They are apart because the
    threads of different stages read them.
    """

    def __init__(self, scratch: Scratch, arena: SharedArena) -> None:
        super().__init__(scratch)
        self._inward, self._outward = arena.inward, arena.outward

    @override
    def reduce(self, payload: Payload, members: Members, scale: float) -> Transfer:
        if (slot := payload.slot) is None:
            return super().reduce(payload, members, scale)
        payload.live = slot.sums
        if members.index != 0:
            self._inward.signal(0, payload.tag)
            return Transfer([])
        awaited = self._inward.signals_from(members.others, payload.tag)
        return Transfer(awaited, lambda: self._scratch.add_up(slot.gradients, scale, out=slot.sums))

    @override
    def broadcast(self, payload: Payload, members: Members) -> Transfer:
        if payload.slot is None:
            return super().broadcast(payload, members)
        if members.index != 0:
            return Transfer(self._outward.signals_from([0], payload.tag))
        self._outward.signal_others(payload.tag)
        return Transfer([])

    @override
    def reduce_scatter(self, payload: Payload, members: Members, scale: float) -> Transfer:
        if (slot := payload.slot) is None:
            return super().reduce_scatter(payload, members, scale)
        size, me = len(members.ranks), members.index
        mine = payload.live = slot.sums.tensor_split(size)[me]
        terms = [gradients.tensor_split(size)[me] for gradients in slot.gradients]
        self._inward.signal_others(payload.tag)
        awaited = self._inward.signals_from(members.others, payload.tag)
        return Transfer(awaited, lambda: self._scratch.add_up(terms, scale, out=mine))

    @override
    def all_gather(self, payload: Payload, members: Members) -> Transfer:
        if payload.slot is None:
            return super().all_gather(payload, members)
        self._outward.signal_others(payload.tag)
        return Transfer(self._outward.signals_from(members.others, payload.tag))

    @override
    def enter_leader(self, payload: Payload, members: Members) -> None:
        if payload.slot is not None:
            payload.live = payload.slot.sums

    @override
    def enter_part(self, payload: Payload, members: Members) -> None:
        if payload.slot is None:
            super().enter_part(payload, members)
        else:
            payload.live = payload.slot.sums.tensor_split(len(members.ranks))[members.index]


class BackendCollectives(Collectives):
    """The backend's own collectives (NCCL); sums are made in the wire's dtype."""

    has_halves = False

    @override
    def reduce(self, payload: Payload, members: Members, scale: float) -> Transfer:
        live = payload.live
        work = dist.reduce(live, members.ranks[0], group=members.group, async_op=True)
        return Transfer([(None, work)], None if scale == 1.0 else lambda: live.mul_(scale))

    @override
    def broadcast(self, payload: Payload, members: Members) -> Transfer:
        work = dist.broadcast(payload.live, members.ranks[0], group=members.group, async_op=True)
        return Transfer([(None, work)])

    @override
    def reduce_scatter(self, payload: Payload, members: Members, scale: float) -> Transfer:
        # The piece is padded, so that its parts have the same size, as the backend demands.
        whole = payload.live
        mine = _cut(payload, members)[members.index]
        work = dist.reduce_scatter_single(mine, whole, group=members.group, async_op=True)
        return Transfer([(None, work)], None if scale == 1.0 else lambda: mine.mul_(scale))

    @override
    def all_gather(self, payload: Payload, members: Members) -> Transfer:
        mine, payload.live = payload.live, _joined(payload.splits.pop())
        work = dist.all_gather_single(payload.live, mine, group=members.group, async_op=True)
        return Transfer([(None, work)])


def all_reduce(payload: Payload, members: Members) -> Transfer:
    """The backend's own all-reduce, a ring."""
    return Transfer([(None, dist.all_reduce(payload.live, group=members.group, async_op=True))])


def _cut(payload: Payload, members: Members) -> list[Tensor]:
    """Cuts a payload into a part for each member, and narrows it to this rank's part; `all_gather` undoes both."""
    parts = list(payload.live.tensor_split(len(members.ranks)))
    payload.splits.append(parts)
    payload.live = parts[members.index]
    return parts


def _joined(parts: list[Tensor]) -> Tensor:
    """The tensor that `parts` were cut from, by the storage they share."""
    first = parts[0]
    return first.as_strided((sum(part.numel() for part in parts),), (1,), first.storage_offset())


def _send(messages: Sequence[tuple[Tensor, int]], members: Members, tag: int) -> list[tuple[int | None, Waitable]]:
    """Sends each tensor to a place among the members; an empty tensor needs no message."""
    return [
        (members.ranks[place], cast(Waitable, dist.isend(tensor, group=members.group, group_dst=place, tag=tag)))
        for tensor, place in messages
        if tensor.numel()
    ]


def _receive(messages: Sequence[tuple[Tensor, int]], members: Members, tag: int) -> list[tuple[int | None, Waitable]]:
    """Receives each tensor from a place among the members."""
    return [
        (members.ranks[place], cast(Waitable, dist.irecv(tensor, group=members.group, group_src=place, tag=tag)))
        for tensor, place in messages
        if tensor.numel()
    ]
