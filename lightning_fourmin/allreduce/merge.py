"""Where to cut buckets, given when backward makes each gradient ready and what a transfer costs.

    ready      g0 g1 g2          g3   g4                  time ->
    transfers  [ g0 g1 g2 ]      [ g3 g4 ]                each costs its latency once, so it pays to wait a little

MG-WFBP (Shi et al. 2019) merges a gradient into the next one if that is ready before the transfer could start, or
within a latency of that. Taken one after the other such steps can merge a whole net; here all cuts are compared under
the same model, so the last transfer never ends later than with that rule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fourmin.allreduce.cost import Link


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient, and when backward has made it, in seconds after its start."""

    num_bytes: int
    ready_s: float


def merge(gradients: Sequence[ReadyGradient], transfer: Link, wire_share: float = 1.0) -> list[list[ReadyGradient]]:
    """Buckets of gradients in ready order; `wire_share`: bytes on the wire by bytes of gradients.

    A bucket starts when it is ready and the one before it is done. So the best way to cut the first i gradients is a
    best way to cut the first j, and the others as one bucket: all j are tried.
    """
    starts = [0]
    done_s = [0.0]
    for end, last in enumerate(gradients, start=1):
        num_bytes, best_s, best_start = 0, math.inf, 0
        for start in range(end - 1, -1, -1):
            num_bytes += gradients[start].num_bytes
            took_s = transfer.latency_s + wire_share * num_bytes * transfer.s_per_byte
            # Of equally good ways the one with the largest buckets: other things than the model's cost time, too.
            if (ends_s := max(done_s[start], last.ready_s) + took_s) <= best_s:
                best_s, best_start = ends_s, start
        done_s.append(best_s)
        starts.append(best_start)
    buckets: list[list[ReadyGradient]] = []
    end = len(gradients)
    while end:
        buckets.insert(0, list(gradients[starts[end] : end]))
        end = starts[end]
    return buckets
