"""Will it help me? What a step takes with plain DDP and with fourmin, in one sentence."""

from lightning_fourmin.allreduce.table import AllReduceTable
from lightning_fourmin.text import readable_size

WORTH_SAYING = 1.05


def sentence_for(ddp_ms: float, ours_ms: float, compute_ms: float, how: str) -> str:
    """What was measured for a module; `compute_ms`: a step of it that sends nothing."""
    times = f"{ddp_ms:.0f} ms a step with ddp, {ours_ms:.0f} ms with fourmin"
    exposed_ms = max(0.0, ddp_ms - compute_ms)
    if ddp_ms / ours_ms >= WORTH_SAYING:
        left_ms = max(0.0, ours_ms - compute_ms)
        return (
            f"Will it help you? Yes: {times}, {ddp_ms / ours_ms:.2f}x; of {exposed_ms:.0f} ms that communication adds "
            f"to a step {left_ms:.0f} ms are left ({how})."
        )
    why = f"communication is {exposed_ms / ddp_ms:.0%} of a step with ddp"
    why += ", and nothing that was tried is faster" if exposed_ms / ddp_ms >= 0.05 else ": there is little to gain"
    return f"Will it help you? Not in speed: {times}; {why}."


def sentence_without_model(table: AllReduceTable) -> str:
    """What can be said when no module is given."""
    largest = table.rows[-1]
    best = table.choose(largest.num_bytes)
    gain = largest.milliseconds["ring"] / largest.milliseconds[best]
    found = f"an all-reduce of {readable_size(largest.num_bytes)} takes {largest.milliseconds['ring']:.1f} ms as a ring"
    if gain >= WORTH_SAYING:
        found += f" and {largest.milliseconds[best]:.1f} ms as {best}, {gain:.2f}x"
    else:
        found += ", and nothing else is faster"
    return f"Will it help you? {found}; how much of it your backward hides tells `fourmin tune model=NAME`."
