"""Will it help me? What a step is expected to take with plain DDP and with fourmin, in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fourmin.comm.fusion import MIB
from lightning_fourmin.comm.merge import ReadyGradient, last_done_s
from lightning_fourmin.comm.table import AllReduceTable, readable

DDP_FIRST_BYTES, DDP_BYTES = 1 * MIB, 25 * MIB
"""The sizes at which DDP closes its first and its other buckets."""
WORTH_SAYING = 1.05


@dataclass(frozen=True)
class StepTimes:
    """A training step of one rank without communication."""

    gradients: Sequence[ReadyGradient]
    """In ready order."""
    backward_s: float
    rest_s: float
    """Forward and optimizer."""


def sentence_for(
    step: StepTimes, table: AllReduceTable, buckets: Sequence[Sequence[ReadyGradient]], wire_share: float
) -> str:
    """What to expect for a module whose step was measured, cut into these buckets.

    One bucket is taken to be under way at a time, and communication not to slow the computing.
    """

    def ring_s(num_bytes: int) -> float:
        return 1e-3 * table.expected_ms(num_bytes)["ring"]

    def chosen_s(num_bytes: int) -> float:
        on_wire = round(num_bytes * wire_share)
        return 1e-3 * table.expected_ms(on_wire)[table.choose(on_wire)]

    exposed = [
        max(0.0, last_done_s(cut, transfer_s) - step.backward_s)
        for cut, transfer_s in ((ddp_buckets(step.gradients), ring_s), (buckets, chosen_s))
    ]
    ddp_s, ours_s = (step.backward_s + step.rest_s + s for s in exposed)
    times = f"{1e3 * ddp_s:.0f} ms a step with ddp, {1e3 * ours_s:.0f} ms with fourmin"
    if ddp_s / ours_s < WORTH_SAYING:
        why = f"{exposed[0] / ddp_s:.0%} of a step is communication that backward does not hide, and"
        why += " what is there takes as long here" if exposed[0] / ddp_s >= 0.05 else " there is little to gain"
        return f"Will it help you? Not in speed: {times} expected; with ddp {why}."
    how = f"{len(buckets)} buckets, {table.summary()}"
    if wire_share != 1.0:
        how += f", {wire_share:g} of the bytes on the wire"
    return (
        f"Will it help you? Yes: {times} expected, {ddp_s / ours_s:.2f}x; of {1e3 * exposed[0]:.0f} ms communication "
        f"that backward does not hide {1e3 * exposed[1]:.0f} ms are left ({how})."
    )


def sentence_without_model(table: AllReduceTable) -> str:
    """What can be said when no module is given."""
    largest = table.rows[-1]
    best = table.choose(largest.num_bytes)
    gain = largest.milliseconds["ring"] / largest.milliseconds[best]
    found = f"an all-reduce of {readable(largest.num_bytes)} takes {largest.milliseconds['ring']:.1f} ms as a ring"
    if gain >= WORTH_SAYING:
        found += f" and {largest.milliseconds[best]:.1f} ms as {best}, {gain:.2f}x"
    else:
        found += ", and nothing else is faster"
    return f"Will it help you? {found}; how much of it your backward hides tells `fourmin tune model=NAME`."


def ddp_buckets(gradients: Sequence[ReadyGradient]) -> list[list[ReadyGradient]]:
    """As DDP cuts them: a bucket closes when it reaches its size."""
    buckets: list[list[ReadyGradient]] = [[]]
    for gradient in gradients:
        limit = DDP_FIRST_BYTES if len(buckets) == 1 else DDP_BYTES
        if buckets[-1] and sum(merged.num_bytes for merged in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(gradient)
    return buckets
