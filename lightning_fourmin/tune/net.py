"""`fourmin tune model=...`: which fusion threshold and which all-reduce a net trains fastest with, by real steps.

table  --candidates-->  a few plans  --search-->  the fastest  --compare-->  verdict, and table with its settings
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fourmin.allreduce.measure_table import Progress
from lightning_fourmin.allreduce.plan import HYBRID, SHORT_ROWS, CommOptions, CommPlan
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.text import plural
from lightning_fourmin.tune.step_trial import StepTrial, sum_of

THRESHOLDS = (1.0, 0.25, 4.0)
"""The fusion thresholds that are tried, as multiples of the default."""
SEARCH_SHARE = 0.4
"""The share of the budget for finding the fastest plan; the rest compares it with DDP."""


@dataclass(frozen=True)
class Candidate:
    """Settings that are tried, and the plan that they make."""

    options: CommOptions
    plan: CommPlan

    def __str__(self) -> str:
        assert self.plan.fusion is not None
        buckets = plural(len(self.plan.fusion.buckets), "bucket")
        return f"fusion_mb={self.options.fusion_mb:g}, {buckets}, {self.plan.table.summary()}"

    def found_in(self, table: AllReduceTable) -> AllReduceTable:
        """The table that makes later runs use these settings."""
        algorithm = None if self.options.algorithm == HYBRID else self.options.algorithm
        return replace(table, fusion_mb=self.options.fusion_mb, algorithm=algorithm)


def candidates(
    options: CommOptions,
    topology: Topology,
    table: AllReduceTable,
    parameters: Sequence[tuple[str, nn.Parameter]],
) -> list[Candidate]:
    """The plans to try: THRESHOLDS with the table's choices, and each algorithm alone at the default threshold.

    A plan that sends the same pieces by the same algorithms as one before it is left out.
    """
    default_mb = default_fusion_mb(table.groups_of(topology), table.backend)
    tried = [replace(options, fusion_mb=factor * default_mb) for factor in THRESHOLDS]
    tried += [replace(options, fusion_mb=default_mb, algorithm=name) for name in table.rows[0].milliseconds]
    different: dict[tuple[object, ...], Candidate] = {}
    for settings in tried:
        plan = CommPlan.decide(settings, topology, table.backend, table, parameters)
        different.setdefault(tuple(row.sending for row in plan.rows), Candidate(settings, plan))
    return list(different.values())


def tune_net(
    net: nn.Module,
    inputs: Tensor,
    topology: Topology,
    table: AllReduceTable,
    groups: ProcessGroups,
    options: CommOptions,
    budget_s: float,
    progress: Progress,
) -> tuple[AllReduceTable, list[str]]:
    """The table with the settings that train the net fastest, and lines on what was found; a collective call.

    The last line is the sentence on whether fourmin helps.
    """
    parameters = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    # The time of a step does not depend on the learning rate. At 0 the weights stay, so no loss becomes infinite.
    optimizer = torch.optim.SGD([parameter for _, parameter in parameters], lr=0.0, momentum=0.9)

    def step(wrapped: nn.Module, batch: Tensor) -> None:
        optimizer.zero_grad()
        sum_of(wrapped(batch)).backward()
        optimizer.step()

    tried = candidates(options, topology, table, parameters)
    trial = StepTrial(net, inputs, step, groups)
    start_s = time.monotonic()
    # Otherwise the collection after each turn takes longer than its steps, as it looks at all of torch.
    gc.freeze()
    try:
        times = trial.search([one.plan for one in tried], SEARCH_SHARE * budget_s, lambda share: progress(share / 2))
        medians = [statistics.median(ms) if ms else 0.0 for ms in times]
        best = tried[medians.index(min(medians))]
        left_s = max(1e-6, budget_s - (time.monotonic() - start_s))
        verdict = trial.compare(best.plan, left_s, lambda share: progress(0.5 + share / 2))
    finally:
        gc.unfreeze()
    lines = [
        f"{ms:10.1f} ms  n={len(found)}  {one}" for ms, found, one in zip(medians, times, tried, strict=True) if found
    ]
    rounds = ((verdict.compute_ms, "without communication"), (verdict.ddp_ms, "ddp"), (verdict.ours_ms, "fourmin"))
    return best.found_in(table), [
        *(["steps with each plan:", *lines] if lines else []),
        f"fastest: {best}",
        best.plan.explain(SHORT_ROWS),
        f"steps in {plural(verdict.num_rounds, 'round')} of these three:",
        *(f"{ms:10.1f} ms  {what}" for ms, what in rounds),
        verdict.sentence(str(best)),
    ]
