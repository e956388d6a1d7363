"""The answer to "Will it help you?": what a step takes with plain DDP and with fourmin, in one sentence."""

from lightning_fourmin.allreduce.algorithms import Ring
from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.text import readable_size

CLEAR_GAIN = 1.05
"""The speedup from which on a plan or an algorithm is called faster."""
SMALL_SHARE = 0.05
"""The share of a step with plain DDP below which communication leaves little to gain."""


def sentence_for(ddp_ms: float, ours_ms: float, compute_ms: float, how: str) -> str:
    """The sentence for a net that was tried.

    Args:
        ddp_ms: the time of a step with plain DDP.
        ours_ms: the time of a step with the fastest plan.
        compute_ms: the time of a step without communication.
        how: the settings of the fastest plan, in words.
    """
    times = f"{ddp_ms:.0f} ms a step with ddp, {ours_ms:.0f} ms with fourmin"
    exposed_ms = max(0.0, ddp_ms - compute_ms)
    if ddp_ms / ours_ms >= CLEAR_GAIN:
        left_ms = max(0.0, ours_ms - compute_ms)
        return (
            f"Will it help you? Yes: {times}, {ddp_ms / ours_ms:.2f}x; of {exposed_ms:.0f} ms that communication adds "
            f"to a step {left_ms:.0f} ms are left ({how})."
        )
    share = exposed_ms / ddp_ms
    reason = ", and nothing that was tried is faster" if share >= SMALL_SHARE else ": there is little to gain"
    return f"Will it help you? Not in speed: {times}; communication is {share:.0%} of a step with ddp{reason}."


def sentence_without_model(table: AllReduceTable) -> str:
    """The sentence if no net was given: what the table says about its largest size."""
    largest = table.rows[-1]
    best = table.choose(largest.num_bytes)
    ring_ms, best_ms = largest.milliseconds[Ring.name], largest.milliseconds[best]
    found = f"an all-reduce of {readable_size(largest.num_bytes)} takes {ring_ms:.1f} ms as a ring"
    if ring_ms / best_ms >= CLEAR_GAIN:
        found += f" and {best_ms:.1f} ms as {best}, {ring_ms / best_ms:.2f}x"
    else:
        found += ", and nothing else is faster"
    return f"Will it help you? {found}; how much of it your backward hides tells `fourmin tune model=NAME`."
