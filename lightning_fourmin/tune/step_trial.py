"""Real steps of a net with each way to send its gradients: which one to train with, and what it gains.

An all-reduce that is timed alone does not tell. In a step buckets follow each other, so the busiest link counts and not
the latency, and sending takes its share of the cores from computing.

    turn 1   ddp | plan 1 | plan 2 | plan 3        each: two steps to warm up, three that count
    turn 2   plan 3 | plan 2 | plan 1 | ddp
    turn 3   plan 1 | plan 3                       those that may still be the fastest, until the budget is spent
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fourmin.allreduce.broadcast_object import agreed
from lightning_fourmin.allreduce.buckets import FusionPlan, wire_bytes
from lightning_fourmin.allreduce.engine import Engine, all_reduce_hook
from lightning_fourmin.allreduce.measure_table import Progress, timed_ms
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.strategy import only_batch_norm_statistics

NUM_WARMUP, NUM_TIMED = 2, 3
"""Steps: DDP cuts its buckets anew after the first one."""
IN_REACH = 1.1
"""Of the time of the fastest: a plan that takes more is not tried a third time."""

Step = Callable[[nn.Module, Tensor], object]
"""Forward, backward and update of a net on a batch."""


def ways_to_send(plan: FusionPlan, table: AllReduceTable, wire_share: float) -> list[FusionPlan]:
    """The plan by the table, and with each single algorithm where that is not the same."""
    different: dict[tuple[str, ...], FusionPlan] = {}
    for way in (plan, *(replace(plan, algorithm=name) for name in table.rows[0].milliseconds)):
        by = table.for_plan(way)
        chosen = tuple(by.choose(round(bucket.num_bytes * wire_share)) for bucket in plan.buckets)
        different.setdefault(chosen, way)
    return list(different.values())


class StepTrial:
    """Trains a net on a batch for a while; every method is a collective call."""

    def __init__(
        self,
        net: nn.Module,
        batch: Tensor,
        step: Step,
        topology: Topology,
        table: AllReduceTable,
        groups: ProcessGroups,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._net, self._batch, self._step = net, batch, step
        self._topology, self._table, self._groups, self._wire_dtype = topology, table, groups, wire_dtype

    def measure(
        self, plans: Sequence[FusionPlan | None], budget_s: float, progress: Progress = lambda share: None
    ) -> list[list[float]]:
        """Milliseconds of steps with each plan, None being plain DDP; forth and back, then as the budget allows."""
        times: list[list[float]] = [[] for _ in plans]
        order = list(range(len(plans)))
        start_s, turn, spent = time.monotonic(), 0, 0.0
        while turn < 2 or agreed(spent * (turn + 1) / turn) <= 1.0:
            for i in order:
                times[i] += self._turn(plans[i])
                spent = (time.monotonic() - start_s) / budget_s
                progress(min(spent, 1.0))
            turn += 1
            order.reverse()
            if turn == 2:
                medians = [statistics.median(ms) for ms in times]
                order = [i for i in order if medians[i] <= IN_REACH * min(medians)]
        progress(1.0)
        return times

    def _turn(self, plan: FusionPlan | None) -> list[float]:
        with self._wrapped(plan) as wrapped:
            step = partial(self._step, wrapped)
            times = [timed_ms(step, self._batch) for _ in range(NUM_WARMUP + NUM_TIMED)]
        # DDP refers to itself: collected, it lets go of the net before that is wrapped again.
        del wrapped, step
        gc.collect()
        return times[NUM_WARMUP:]

    @contextmanager
    def _wrapped(self, plan: FusionPlan | None) -> Iterator[DistributedDataParallel]:
        # Weights need not be equal to be timed.
        if plan is None:
            yield DistributedDataParallel(self._net, init_sync=False)
            return
        caps = list(plan.caps_mb)
        net = DistributedDataParallel(
            self._net,
            init_sync=False,
            forward_sync_buffers=not only_batch_norm_statistics(self._net),  # as the strategy has it
            bucket_cap_mb_list=caps,  # type: ignore[arg-type]
        )
        with closing(self._engine(plan)) as engine:
            net.register_comm_hook(engine, all_reduce_hook)
            yield net
            engine.raise_error()

    def _engine(self, plan: FusionPlan) -> Engine:
        return Engine(
            self._topology,
            self._table.for_plan(plan),
            self._groups,
            self._batch.device,
            self._wire_dtype,
            shared_bytes=wire_bytes(self._net, self._wire_dtype),
        )
