"""`fourmin tune model=...`: which all-reduce and which buckets a net trains fastest with, found by steps of it."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fourmin.allreduce.broadcast_object import agreed, from_rank_0
from lightning_fourmin.allreduce.buckets import FusionPlan, in_ready_order
from lightning_fourmin.allreduce.cuts import Cuts, cuts_path, write_cuts
from lightning_fourmin.allreduce.fit_links import fit_transfer
from lightning_fourmin.allreduce.measure_table import Progress
from lightning_fourmin.allreduce.merge import ReadyGradient, merge
from lightning_fourmin.allreduce.process_groups import ProcessGroups
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.simulate.layer_profile import Profile, measure_profile, sum_of
from lightning_fourmin.text import plural
from lightning_fourmin.tune.step_trial import StepTrial, ways_to_send
from lightning_fourmin.tune.verdict import sentence_for

Bar = Callable[[str], AbstractContextManager[Progress]]
"""Shows progress of what it is told."""


@dataclass(frozen=True)
class NetTuner:
    """Tunes for one net on one batch; every method is a collective call."""

    net: nn.Module
    inputs: Tensor
    topology: Topology
    table: AllReduceTable
    groups: ProcessGroups
    wire_dtype: torch.dtype | None

    def tune(self, table_path: Path, bar: Bar, budget_s: float) -> list[str]:
        """Writes what is fastest beside the table and tells what it gains; each of two trials may take the budget."""
        parameters = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        wire_share = 1.0 if self.wire_dtype is None else self.wire_dtype.itemsize / torch.float32.itemsize
        # Ranks measure at the same time, as they will train.
        profile = measure_profile(self.net, self.inputs, optimizer=_sgd, before_step=dist.barrier)
        optimizer = _sgd([parameter for _, parameter in parameters])

        def step(wrapped: nn.Module, inputs: Tensor) -> None:
            optimizer.zero_grad()
            sum_of(wrapped(inputs)).backward()
            optimizer.step()

        trial = StepTrial(self.net, self.inputs, step, self.topology, self.table, self.groups, self.wire_dtype)
        told: list[str] = []

        def compare(what: str, plans: Sequence[FusionPlan | None]) -> list[float]:
            with bar(f"measuring steps, {what}") as progress:
                times = trial.measure(plans, budget_s, progress)
            medians = [statistics.median(ms) for ms in times]
            told.append(f"steps, {what}:")
            for median, ms, plan in zip(medians, times, plans, strict=True):
                told.append(f"{median:10.1f} ms  n={len(ms)}  {self._said(plan)}")
            return medians

        default = FusionPlan.build(parameters, default_fusion_mb(self.topology, self.table.backend))
        ways = ways_to_send(default, self.table, wire_share)
        ddp_ms, *medians = compare("each all-reduce", [None, *ways])
        best_ms, best = min(zip(medians, ways, strict=True), key=lambda pair: pair[0])
        cut_bytes = agreed(_cut(parameters, profile, self.table.for_plan(best), wire_share))
        cuts = FusionPlan.from_cuts(parameters, cut_bytes, algorithm=best.algorithm)
        if cuts.buckets != best.buckets:
            again_ms, cut_ms = compare("buckets of the default size or cut for this net", [best, cuts])
            if cut_ms < again_ms:
                # Trials are minutes apart: the plan that is in both says how the machine's pace has changed.
                best_ms, best = best_ms * cut_ms / again_ms, cuts
        path = cuts_path(table_path, parameters)
        main = in_ready_order(parameters)[0][1].dtype
        cut_bytes = [bucket.num_bytes for bucket in best.buckets if bucket.dtype is main]
        found = Cuts(tuple(cut_bytes), best.algorithm, self.topology.key)
        made = f"{type(self.net).__name__}, {tuple(self.inputs.shape)}, {self.table.made}"
        from_rank_0(lambda: write_cuts(path, found, made))
        gain = sentence_for(ddp_ms, best_ms, 1e3 * profile.compute_s, self._said(best))
        return [*told, f"fastest: {self._said(best)}: {path}", gain]

    def _said(self, plan: FusionPlan | None) -> str:
        return (
            "ddp" if plan is None else f"{plural(len(plan.buckets), 'bucket')}, {self.table.for_plan(plan).summary()}"
        )


def _cut(
    parameters: Sequence[tuple[str, nn.Parameter]], profile: Profile, table: AllReduceTable, wire_share: float
) -> list[int]:
    """Bytes of the buckets for gradients that are ready when the profile says."""
    # DDP fills its buckets in the reverse order of registration, which is the ready order but for small changes.
    ready_s = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    gradients, latest_s = [], 0.0
    for name, parameter in in_ready_order(parameters):
        latest_s = max(latest_s, ready_s[name])
        gradients.append(ReadyGradient(parameter.numel() * parameter.element_size(), latest_s))
    transfer = fit_transfer(table, sum(gradient.num_bytes for gradient in gradients))
    return [sum(gradient.num_bytes for gradient in bucket) for bucket in merge(gradients, transfer, wire_share)]


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A step costs what it costs at any rate; at this one the weights stay, so no loss can make them infinite.
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
