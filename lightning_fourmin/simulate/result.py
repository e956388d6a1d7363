"""The answer of `fourmin plan`: as text, as JSON, as a picture and as a Chrome trace."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fourmin.allreduce.plan import SHORT_ROWS
from lightning_fourmin.files import write_whole
from lightning_fourmin.simulate.best_settings import Best, best_settings, bottleneck
from lightning_fourmin.simulate.layer_profile import Profile
from lightning_fourmin.simulate.picture import draw
from lightning_fourmin.simulate.scenario import (
    Prediction,
    Scenario,
    TrainingTime,
    scaling_curve,
    techniques,
    training_time,
)
from lightning_fourmin.simulate.step import Span
from lightning_fourmin.text import dtype_name


@dataclass(frozen=True)
class SimulationResult:
    """The predictions for a scenario and for variations of it."""

    scenario: Scenario
    prediction: Prediction
    training: TrainingTime
    best: Best
    curves: dict[str, list[Prediction]]
    """Predictions for 1, 2, 4 ... ranks: with all of the paper's techniques, without each, and with none."""
    bottleneck: str
    """What slows the step most, in a sentence."""

    @classmethod
    def of(
        cls, scenario: Scenario, fp32_profile: Profile, epochs: int, num_samples: int, most_ranks: int
    ) -> "SimulationResult":
        """Simulates the scenario and all variations; variations without FP16 have `fp32_profile` as their profile."""
        variants = techniques(scenario, fp32_profile)
        return cls(
            scenario,
            scenario.prediction,
            training_time(scenario, epochs, num_samples),
            best_settings(scenario),
            {name: scaling_curve(variant, most_ranks) for name, variant in variants.items()},
            bottleneck(scenario),
        )

    def as_dict(self) -> dict[str, Any]:
        """The content of plan.json."""
        plan, profile = self.scenario.plan, self.scenario.profile
        return {
            "format": 1,
            "cluster": self.scenario.cluster.name,
            "topology": str(plan.topology),
            "batch_size": profile.batch_size,
            "layer_times": profile.source,
            "fusion_mb": self.scenario.used_fusion_mb,
            "wire_dtype": dtype_name(self.scenario.wire_dtype),
            "algorithm": self.scenario.algorithm,
            "table": plan.table.summary(),
            "rows": [row.as_dict() for row in plan.rows],
            "prediction": asdict(self.prediction),
            "training": asdict(self.training),
            "best": asdict(self.best),
            "curves": {name: [asdict(point) for point in curve] for name, curve in self.curves.items()},
            "bottleneck": self.bottleneck,
        }

    def __str__(self) -> str:
        now, plan, best = self.prediction, self.scenario.plan, self.best
        hours, num_steps = self.training.hours, self.training.num_steps
        wire = dtype_name(self.scenario.wire_dtype)
        lines = [
            f"{self.scenario.cluster.name}: {plan.topology}; batch {self.scenario.profile.batch_size} a rank",
            f"layer times   {self.scenario.profile.source}",
            f"all-reduce    buckets: {now.num_buckets}; {wire} wire, {plan.table.summary()} ({plan.table.source})",
            f"step          {now.step_ms:.1f} ms = compute {now.compute_ms:.1f} + exposed {now.exposed_ms:.1f} "
            f"(communication {now.comm_ms:.1f})",
            f"T = S * N * e {now.T:,.0f} = {now.S:,.1f} * {now.N} * {now.e:.3f} samples/s",
            f"{self.training.epochs} epochs     {num_steps:,} steps, "
            + (f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"),
            f"best          {best.algorithm}, fusion_mb={best.fusion_mb:g}, pieces of {best.chunk_mb:g} MiB (by "
            f"table): {best.step_ms:.1f} ms; the paper's hybrid "
            f"with switch_mb={best.switch_mb:g}: {best.switch_step_ms:.1f} ms",
            "by algorithm  " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in best.by_algorithm.items()),
            "",
            plan.explain(SHORT_ROWS),
            "",
            "efficiency e by ranks, each with the best fusion threshold and all-reduce unless they are given:",
            "   ranks" + "".join(f"{name:>16}" for name in self.curves),
        ]
        for points in zip(*self.curves.values(), strict=True):
            lines.append(f"{points[0].N:8,d}" + "".join(f"{point.e:16.3f}" for point in points))
        return "\n".join([*lines, "", self.bottleneck])

    def write(self, folder: Path) -> None:
        """Writes plan.json, trace.json (for Perfetto) and plan.svg into a folder, each complete or not at all."""
        write_whole(folder / "plan.json", json.dumps(self.as_dict(), indent=1) + "\n")
        events = chrome_events(self.scenario.step.spans)
        write_whole(folder / "trace.json", json.dumps({"traceEvents": events}))
        write_whole(folder / "plan.svg", draw(self.scenario, self.curves))


def chrome_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """The spans of the one rank that stands for all, as events of the form that a measured trace has."""
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "every rank (predicted)"}}
    ]
    for lane, number in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}})
    for span in spans:
        event = {"ph": "X", "name": span.name, "pid": 0, "tid": lanes[span.lane], "args": span.details}
        events.append({**event, "ts": 1e6 * span.start_s, "dur": 1e6 * (span.end_s - span.start_s)})
    return events
