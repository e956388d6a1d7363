"""Real steps of a net with each plan: which one to train with, and what it gains.

An all-reduce that is timed alone does not tell. In a step buckets follow each other, so the busiest link counts and not
the latency, and sending takes its share of the cores from computing.

    turn 1   silent | ddp | plan 1 | plan 2 | plan 3        each: two steps to warm up, three that count
    turn 2   plan 3 | plan 2 | plan 1 | ddp | silent
    turn 3   silent | ddp | plan 1 | plan 3                 those that may still be the fastest, until the budget ends
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_fourmin._lightning import tree_leaves
from lightning_fourmin.allreduce.buckets import wire_bytes
from lightning_fourmin.allreduce.engine import Engine, all_reduce_hook
from lightning_fourmin.allreduce.measure_table import Progress, timed_ms
from lightning_fourmin.allreduce.plan import CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups, broadcast_object
from lightning_fourmin.errors import PlanError
from lightning_fourmin.strategy import only_batch_norm_statistics

NUM_WARMUP, NUM_TIMED = 2, 3
"""Steps: DDP cuts its buckets anew after the first one."""
NUM_BASELINES = 2
"""Steps without communication and with plain DDP are timed in every turn."""
IN_REACH = 1.1
"""Times the fastest plan: one that takes more is not tried a third time."""

Step = Callable[[nn.Module, Tensor], object]
"""Forward, backward and update of a net on a batch."""


class StepTrial:
    """Trains a net on a batch for a while; every method is a collective call."""

    def __init__(self, net: nn.Module, batch: Tensor, step: Step, groups: ProcessGroups) -> None:
        self._net, self._batch, self._step, self._groups = net, batch, step, groups

    def measure(
        self, plans: Sequence[CommPlan], budget_s: float, progress: Progress = lambda share: None
    ) -> "StepTimes":
        """Times steps without communication, with plain DDP and with each plan: forth and back, then as time allows."""
        ways: list[Way] = [self._silent, self._ddp, *(partial(self._planned, plan) for plan in plans)]
        times: list[list[float]] = [[] for _ in ways]
        order = list(range(len(ways)))
        start_s, turn, spent = time.monotonic(), 0, 0.0
        while turn < 2 or broadcast_object(spent * (turn + 1) / turn) <= 1.0:
            for i in order:
                times[i] += self._turn(ways[i])
                spent = (time.monotonic() - start_s) / budget_s
                progress(min(spent, 1.0))
            turn += 1
            order.reverse()
            if turn == 2:
                medians = [statistics.median(ms) for ms in times]
                reach_ms = IN_REACH * min(medians[NUM_BASELINES:])
                order = [i for i in order if i < NUM_BASELINES or medians[i] <= reach_ms]
        progress(1.0)
        silent, ddp, *planned = times
        return StepTimes(silent, ddp, planned)

    def _turn(self, way: "Way") -> list[float]:
        with way() as wrapped:
            step = partial(self._step, wrapped)
            times = [timed_ms(step, self._batch) for _ in range(NUM_WARMUP + NUM_TIMED)]
        # DDP refers to itself: collected, it lets go of the net before that is wrapped again.
        del wrapped, step
        gc.collect()
        return times[NUM_WARMUP:]

    # The nets of a trial need not have equal weights to be timed, so DDP does not bring them to all ranks.

    @contextmanager
    def _silent(self) -> Iterator[DistributedDataParallel]:
        """The net with DDP's buckets, none of which is sent."""
        net = DistributedDataParallel(self._net, init_sync=False)
        net.register_comm_hook(None, noop_hook)
        yield net

    @contextmanager
    def _ddp(self) -> Iterator[DistributedDataParallel]:
        yield DistributedDataParallel(self._net, init_sync=False)

    @contextmanager
    def _planned(self, plan: CommPlan) -> Iterator[DistributedDataParallel]:
        """The net as the strategy wraps it."""
        assert plan.fusion is not None
        caps = list(plan.fusion.caps_mb)
        net = DistributedDataParallel(
            self._net,
            init_sync=False,
            forward_sync_buffers=not only_batch_norm_statistics(self._net),
            bucket_cap_mb_list=caps,  # type: ignore[arg-type]
        )
        shared_bytes = wire_bytes(self._net, plan.wire_dtype)
        with closing(Engine(plan, self._groups, self._batch.device, shared_bytes=shared_bytes)) as engine:
            net.register_comm_hook(engine, all_reduce_hook)
            yield net
            engine.raise_error()


Way = Callable[[], AbstractContextManager[DistributedDataParallel]]
"""Wraps the net of a trial for a while."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of the steps of a trial."""

    silent_ms: list[float]
    """Without communication."""
    ddp_ms: list[float]
    """With plain DDP."""
    planned_ms: list[list[float]]
    """With each plan."""


def sum_of(output: Any) -> Tensor:
    """The sum of all tensors in an output: a loss for a net whose own is not known."""
    sums = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sums:
        raise PlanError(
            f"the module's output ({type(output).__name__}) holds no tensor to differentiate: return one from forward"
        )
    return torch.stack(sums).sum()
