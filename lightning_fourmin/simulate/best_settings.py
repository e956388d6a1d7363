"""The settings that a scenario would be fastest with, found by trying, and the bottleneck of its step."""

from dataclasses import dataclass, replace

from lightning_fourmin.allreduce.algorithms import PREDICTED, algorithm_of, usable_algorithms
from lightning_fourmin.allreduce.buckets import MIB
from lightning_fourmin.allreduce.cost import Link, Links
from lightning_fourmin.allreduce.plan import HYBRID
from lightning_fourmin.allreduce.table import CHUNK_BYTES
from lightning_fourmin.simulate.scenario import Scenario, fastest_of
from lightning_fourmin.simulate.stragglers import Stragglers

# The values that `best_settings` tries.
FUSION_MB = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
CHUNK_MB = (CHUNK_BYTES / MIB, 4.0, 16.0, 64.0)
SWITCH_MB = tuple(4.0**power / 1024 for power in range(9))
"""Switch sizes of the paper's hybrid, 1 KiB to 64 MiB."""
SMALL_SHARE = 0.01
"""If communication adds less than this share to a step, the bottleneck is compute, whatever the links are like."""
FREE_LINK = Link(0.0, 0.0)


@dataclass(frozen=True)
class Best:
    """The settings with which a scenario is fastest on its ranks."""

    algorithm: str
    """One algorithm, or `hybrid` for the choice of the table."""
    fusion_mb: float
    chunk_mb: float
    """The size of the pieces in which large buckets are sent, if the algorithm has phases that can overlap."""
    step_ms: float
    switch_mb: float
    """The best switch of the paper's hybrid (hierarchical up to this size, ring above) with that fusion and those
    pieces."""
    switch_step_ms: float
    """The step with that switch."""
    by_algorithm: dict[str, float]
    """The milliseconds of a step by algorithm, each with the fusion and pieces that are best for it."""


def best_settings(scenario: Scenario) -> Best:
    """Simulates the scenario with every algorithm, fusion threshold and size of pieces, and returns the fastest.

    Algorithms that the package can only predict are part of the comparison, but are not recommended.
    """
    plain = replace(scenario, switch_mb=None)
    names = (HYBRID, *usable_algorithms(scenario.plan.topology), *PREDICTED)
    by_algorithm = {
        name: fastest_of(
            replace(plain, algorithm=name, fusion_mb=fusion_mb, chunk_bytes=int(chunk_mb * MIB))
            for fusion_mb in FUSION_MB
            for chunk_mb in (CHUNK_MB if name == HYBRID or algorithm_of(name).in_pieces else CHUNK_MB[:1])
        )
        for name in names
    }
    best = fastest_of(one for name, one in by_algorithm.items() if name not in PREDICTED)
    switched = fastest_of(replace(best, algorithm=HYBRID, switch_mb=switch_mb) for switch_mb in SWITCH_MB)
    assert best.fusion_mb is not None
    assert switched.switch_mb is not None
    return Best(
        best.algorithm,
        best.fusion_mb,
        best.plan.table.chunk_bytes / MIB,
        1e3 * best.step.step_s,
        switched.switch_mb,
        1e3 * switched.step.step_s,
        {name: 1e3 * one.step.step_s for name, one in by_algorithm.items()},
    )


def bottleneck(scenario: Scenario) -> str:
    """A sentence that names the bottleneck: whatever would shorten the step most if it took no time."""
    now = scenario.prediction
    if scenario.num_ranks == 1:
        return f"Bottleneck: compute; one rank does not communicate in its {now.step_ms:.1f} ms."
    if now.exposed_ms < SMALL_SHARE * now.step_ms:
        return (
            f"Bottleneck: compute, {now.compute_ms:.1f} of {now.step_ms:.1f} ms; communication takes {now.comm_ms:.1f} "
            "ms, nearly all of it behind backward."
        )
    links = scenario.cluster.links
    what_if = {
        "latency between nodes": _with_links(scenario, replace(links, between=Link(0.0, links.between.s_per_byte))),
        "bandwidth between nodes": _with_links(scenario, replace(links, between=Link(links.between.latency_s, 0.0))),
        "the links inside a node": _with_links(scenario, replace(links, inside=FREE_LINK, inside_backend=FREE_LINK)),
        "the cores that communication shares with compute": replace(
            scenario, cluster=replace(scenario.cluster, host=None)
        ),
        "slow ranks": replace(scenario, stragglers=Stragglers()),
    }
    saved_ms = {name: now.step_ms - 1e3 * other.step.step_s for name, other in what_if.items()}
    worst = max(saved_ms, key=lambda name: saved_ms[name])
    return (
        f"Bottleneck: {worst}; without, a step would take {now.step_ms - saved_ms[worst]:.1f} instead of "
        f"{now.step_ms:.1f} ms ({now.exposed_ms:.1f} ms are exposed communication)."
    )


def _with_links(scenario: Scenario, links: Links) -> Scenario:
    """The scenario with other links. It keeps its table, so the choices stay and only the times change."""
    return replace(scenario, cluster=replace(scenario.cluster, links=links), measured=scenario.plan.table)
