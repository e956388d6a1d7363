"""Fits the latency and bandwidth of links to the times of a measured table, as the cost model explains them best."""

import statistics
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_fourmin.allreduce.algorithms import algorithm_of
from lightning_fourmin.allreduce.cost import Link, Links, default_links
from lightning_fourmin.allreduce.table import AllReduceTable, Row
from lightning_fourmin.allreduce.topology import Topology

Floats = NDArray[np.float64]
NOTHING = Link(0.0, 0.0)
NO_LINKS = Links(NOTHING, NOTHING, NOTHING, 0.0)


@dataclass(frozen=True)
class LinkFit:
    """Links, and how far the cost model with them is from what was measured."""

    links: Links
    fitted: tuple[str, ...]
    """The links that the table tells about; the others are the stated defaults."""
    median_error: float
    """Median of |model - measured| / measured over all sizes and algorithms."""

    def __str__(self) -> str:
        parts = []
        for name in self.fitted:
            link: Link = getattr(self.links, name)
            rate = f"{1e-6 / link.s_per_byte:.0f} MB/s" if link.s_per_byte else "unlimited"
            parts.append(f"{name} {1e6 * link.latency_s:.0f} us a step and {rate}")
        return f"{', '.join(parts)}; off by {self.median_error:.0%} (median)"


def fit_links(table: AllReduceTable, topology: Topology) -> LinkFit:
    """The links that leave the least squares of relative errors, with no negative latency or time a byte.

    The cost model is linear in the latency and the time a byte of each link. So a column of the linear problem is what
    the model says when one of them is 1 and all others are 0. A table of one node tells nothing about the link between
    nodes; one of several nodes tells nothing about the backend's link inside a node, because its ring is as fast as its
    slowest link. Sums cost what is stated, since their share cannot be told from that of the bytes.
    """
    stated = default_links(table.backend)
    names: tuple[str, ...] = ("inside", "between") if topology.num_nodes > 1 else ("inside", "inside_backend")
    if topology.largest_group == 1:
        names = names[1:]  # every rank is alone in its group
    units = [
        replace(NO_LINKS, **{name: unit})  # type: ignore[arg-type]
        for name in names
        for unit in (Link(1.0, 0.0), Link(0.0, 1.0))
    ]
    points = [(row, algorithm, ms) for row in table.rows for algorithm, ms in row.milliseconds.items()]
    sums = replace(NO_LINKS, reduce_s_per_byte=stated.reduce_s_per_byte)
    columns = [[_model_s(point, topology, unit) for unit in units] for point in points]
    measured_s = [1e-3 * ms for _, _, ms in points]
    rest_s = [s - _model_s(point, topology, sums) for s, point in zip(measured_s, points, strict=True)]
    found = _non_negative_least_squares(np.array(columns), np.array(rest_s), 1 / np.array(measured_s))
    links = {name: Link(*found[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    fitted = replace(stated, **links)  # type: ignore[arg-type]
    errors = [abs(_model_s(point, topology, fitted) / s - 1) for s, point in zip(measured_s, points, strict=True)]
    return LinkFit(fitted, names, statistics.median(errors))


def _model_s(point: tuple[Row, str, float], topology: Topology, links: Links) -> float:
    row, algorithm, _ = point
    return algorithm_of(algorithm).seconds(row.num_bytes, topology, links)


def _non_negative_least_squares(columns: Floats, values: Floats, weights: Floats) -> list[float]:
    """Leaves out the most negative unknown until none is negative: exact enough for a handful of unknowns."""
    # Seconds a byte are 10^9 times smaller than seconds a step: equal lengths keep the problem well conditioned.
    weighted = columns * weights[:, None]
    lengths = np.linalg.norm(weighted, axis=0)
    kept = np.flatnonzero(lengths).tolist()
    solution = np.zeros(columns.shape[1])
    while kept:
        found = np.linalg.lstsq(weighted[:, kept] / lengths[kept], values * weights, rcond=None)[0]
        if found.min() >= 0:
            solution[kept] = found / lengths[kept]
            break
        kept.pop(int(found.argmin()))
    return list(map(float, solution))
