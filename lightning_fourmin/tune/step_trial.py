"""Times real steps of a net: with each of several plans, then the fastest against plain DDP and no communication.

The times of single all-reduces do not tell which plan is best. In a step buckets follow each other, so that the busiest
link counts rather than latency, and sending takes cores away from computing.

    search    turn 1    plan 1 | plan 2 | plan 3      each turn of a variant: two steps to warm up, three that count
              turn 2    plan 3 | plan 2 | plan 1
              turn 3    plan 1 | plan 3               plans that may still be the fastest, until the budget ends
    compare   round 1   compute | ddp | plan 1        new steps, since those of the search made this plan the winner:
              round 2   plan 1 | ddp | compute        they flatter it; until the ratio is known well enough
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
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
from lightning_fourmin.tune.verdict import LOOKS, Verdict

NUM_WARMUP, NUM_TIMED = 2, 3
"""Steps of a variant in each turn. The first one must not count, because DDP cuts its buckets anew after it."""
IN_REACH = 1.1
"""The time of a step as a multiple of the fastest plan's up to which a plan is tried in a third and later turns."""

Step = Callable[[nn.Module, Tensor], object]
"""Forward, backward and update of a net on a batch."""


class StepTrial:
    """Times the steps of a net on a batch; every method is a collective call.

    All ranks take the same turns: only rank 0's clock decides when the budget is spent. The net is wrapped anew for
    each variant, and its weights are never compared between ranks, so they may differ.
    """

    def __init__(self, net: nn.Module, batch: Tensor, step: Step, groups: ProcessGroups) -> None:
        self._net, self._batch, self._step, self._groups = net, batch, step, groups

    def search(self, plans: Sequence[CommPlan], budget_s: float, progress: Progress) -> list[list[float]]:
        """Milliseconds of steps with each plan: two turns of opposite order, to be fair to all, more as time allows.

        A single plan is the fastest without a step.
        """
        times: list[list[float]] = [[] for _ in plans]
        order = list(range(len(plans)))
        start_s, turn, spent = time.monotonic(), 0, 0.0
        # One more turn begins if it will end within the budget at the pace of the turns so far.
        while len(order) > 1 and (turn < 2 or broadcast_object(spent * (turn + 1) / turn) <= 1.0):
            for i in order:
                times[i] += self._turn(partial(self._planned, plans[i]))
                spent = (time.monotonic() - start_s) / budget_s
                progress(min(spent, 1.0))
            turn += 1
            order.reverse()
            if turn == 2:
                medians = [statistics.median(ms) for ms in times]
                order = [i for i in order if medians[i] <= IN_REACH * min(medians)]
        progress(1.0)
        return times

    def compare(self, plan: CommPlan, budget_s: float, progress: Progress) -> Verdict:
        """Rounds without communication, with plain DDP and with the plan, until the verdict is clear or time is up."""
        variants: list[Variant] = [self._compute_alone, self._ddp, partial(self._planned, plan)]
        times: tuple[list[float], list[float], list[float]] = ([], [], [])
        start_s, num_rounds, num_looks = time.monotonic(), 0, 0
        while True:
            for i in (0, 1, 2) if num_rounds % 2 == 0 else (2, 1, 0):
                times[i].append(statistics.median(self._turn(variants[i])))
            num_rounds += 1
            spent = (time.monotonic() - start_s) / budget_s
            progress(min(spent, 1.0))
            is_over = broadcast_object(spent * (num_rounds + 1) / num_rounds > 1.0)
            if is_over or num_rounds in LOOKS:
                num_looks += 1
                verdict = Verdict.of(*times, num_looks)
                if is_over or verdict.is_clear:
                    progress(1.0)
                    return verdict

    def _turn(self, variant: "Variant") -> list[float]:
        with variant() as wrapped:
            step = partial(self._step, wrapped)
            times = [timed_ms(step, self._batch) for _ in range(NUM_WARMUP + NUM_TIMED)]
        # DDP refers to itself, so only the collector frees it. Its hooks on the parameters must be gone before the next
        # variant wraps the net.
        del wrapped, step
        gc.collect()
        return times[NUM_WARMUP:]

    # Weights that differ between ranks do not change the time of a step. So DDP need not broadcast those of rank 0 for
    # each variant and turn: `init_sync=False`.

    @contextmanager
    def _compute_alone(self) -> Iterator[DistributedDataParallel]:
        """The net with DDP's buckets, none of which is sent."""
        net = DistributedDataParallel(self._net, init_sync=False)
        net.register_comm_hook(None, noop_hook)
        yield net

    @contextmanager
    def _ddp(self) -> Iterator[DistributedDataParallel]:
        """The net with plain DDP."""
        yield DistributedDataParallel(self._net, init_sync=False)

    @contextmanager
    def _planned(self, plan: CommPlan) -> Iterator[DistributedDataParallel]:
        """The net as the strategy wraps it for a plan."""
        assert plan.fusion is not None
        net = DistributedDataParallel(
            self._net,
            init_sync=False,
            forward_sync_buffers=not only_batch_norm_statistics(self._net),
            bucket_cap_mb_list=list(plan.fusion.caps_mb),  # type: ignore[arg-type]
        )
        shared_bytes = wire_bytes(self._net, plan.wire_dtype)
        with closing(Engine(plan, self._groups, self._batch.device, shared_bytes=shared_bytes)) as engine:
            net.register_comm_hook(engine, all_reduce_hook)
            yield net
            engine.raise_error()


Variant = Callable[[], AbstractContextManager[DistributedDataParallel]]
"""A context in which the net of a trial is wrapped, for the time of a turn."""


def sum_of(output: Any) -> Tensor:
    """The sum of all tensors in an output: a loss for a net whose own loss is not known."""
    sums = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sums:
        raise PlanError(
            f"the module's output ({type(output).__name__}) holds no tensor to differentiate: return one from forward"
        )
    return torch.stack(sums).sum()
