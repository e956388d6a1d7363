"""The large-batch table on CIFAR-10, ours beside the paper's, from the files of runs in benchmarks/large_batch/runs.

Example: .venv/bin/python benchmarks/large_batch.py runs/large_batch/alexnet runs/large_batch/resnet  # takes over runs
         .venv/bin/python benchmarks/large_batch.py                                                   # only the table
"""

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from large_batch_runs import RUNS, Row, keep, read_rows
from results import table, write

GOAL_POINTS = 0.5
"""The full recipe may be this far below the small-batch baseline, or as far as the seeds spread."""
ROWS = {
    "alexnet_baseline": ("small batch, SGD", "-"),
    "alexnet_sgd": ("large batch, SGD, linear scaling", "-"),
    "alexnet_lars": ("+ LARS", "55.8 [fig]"),
    "alexnet_no_decay": ("+ no decay, no trust ratio on bias and BN", "57.1 [fig]"),
    "alexnet_bn5": ("+ BN after pool5", "58.7 [abs]"),
    "alexnet_fp16": ("+ FP16 with FP32 masters: full recipe", "58.7 [abs]"),
    "alexnet_fp16_naive": ("naive FP16 LARS instead", "stalls [paper]"),
    "alexnet_larger_sgd": ("larger batch, SGD, linear scaling", "-"),
    "alexnet_larger_fp16": ("larger batch, full recipe", "-"),
    "resnet_baseline": ("small batch, SGD", "75.3 [team]"),
    "resnet_sgd": ("large batch, SGD, linear scaling", "60.6 [paper]"),
    "resnet_sgd_tuned": ("large batch, SGD, a rate of its own, Nesterov momentum", "-"),
    "resnet_lars": ("+ LARS, Nesterov momentum from here", "71.9 [paper]"),
    "resnet_no_decay": ("+ no decay, no trust ratio on bias and BN", "76.2 [unc]"),
    "resnet_fp16": ("+ FP16 with FP32 masters: full recipe", "75.8 [abs]"),
    "resnet_fp16_naive": ("naive FP16 LARS instead", "stalls [paper]"),
}
"""Experiment -> what it is, top-1 of the paper on ImageNet at 64K (its baseline at 256)."""
MODELS = {"alexnet": "alexnet_bn_small", "resnet": "resnet_small"}
RECIPES_IN_FP32 = {"alexnet": "alexnet_bn5", "resnet": "resnet_no_decay"}
Direction = Literal["higher", "lower", "not lower"]


@dataclass(frozen=True)
class Effect:
    """A claim of the paper: what one change does to top-1."""

    claim: str
    before: str
    after: str
    paper: Direction
    figures: str
    """The paper's own, where it has them."""


EFFECTS = [
    Effect("a large batch costs SGD accuracy", "alexnet_baseline", "alexnet_sgd", "lower", "seen on ResNet-50"),
    Effect("LARS wins it back", "alexnet_sgd", "alexnet_lars", "higher", "seen on ResNet-50"),
    Effect("no decay on bias and BN helps", "alexnet_lars", "alexnet_no_decay", "higher", "55.8 -> 57.1 [fig]"),
    Effect("BN after pool5 helps", "alexnet_no_decay", "alexnet_bn5", "higher", "57.1 [fig] -> 58.7 [abs]"),
    Effect("FP16 with FP32 masters costs nothing", "alexnet_bn5", "alexnet_fp16", "not lower", "no loss [abs]"),
    Effect("naive FP16 LARS costs accuracy", "alexnet_fp16", "alexnet_fp16_naive", "lower", "stalls [paper]"),
    Effect("SGD loses more at a larger batch", "alexnet_sgd", "alexnet_larger_sgd", "lower", "-"),
    Effect("there the full recipe beats SGD", "alexnet_larger_sgd", "alexnet_larger_fp16", "higher", "-"),
    Effect("a large batch costs SGD accuracy", "resnet_baseline", "resnet_sgd", "lower", "75.3 [team] -> 60.6 [paper]"),
    Effect("a rate of its own wins it back", "resnet_sgd", "resnet_sgd_tuned", "higher", "-"),
    Effect("LARS with Nesterov momentum wins it back", "resnet_sgd", "resnet_lars", "higher", "60.6 -> 71.9 [paper]"),
    Effect("the full recipe beats SGD at a rate of its own", "resnet_sgd_tuned", "resnet_fp16", "higher", "-"),
    Effect("no decay on bias and BN helps", "resnet_lars", "resnet_no_decay", "higher", "71.9 [paper] -> 76.2 [unc]"),
    Effect("FP16 with FP32 masters costs nothing", "resnet_no_decay", "resnet_fp16", "not lower", "no loss [abs]"),
    Effect("naive FP16 LARS costs accuracy", "resnet_fp16", "resnet_fp16_naive", "lower", "stalls [paper]"),
]


def usual_std(rows: Mapping[str, Row]) -> float:
    """What stands in for the spread of a row with one seed: the median of those that have several, NaN if none has."""
    return statistics.median([row.std for row in rows.values() if row.std is not None] or [math.nan])


@dataclass(frozen=True)
class Comparison:
    """Two rows by their means, in points."""

    difference: float
    spread: float
    """Standard deviation of the difference of two runs; NaN as long as no row has several seeds."""
    one_seed: bool = False
    """Whether neither row has several, and the spread is that of others."""

    @classmethod
    def of(cls, before: str, after: str, rows: Mapping[str, Row]) -> "Comparison":
        first, second = rows[before], rows[after]
        usual = usual_std(rows)
        stds = [usual if row.std is None else row.std for row in (first, second)]
        return cls(second.mean - first.mean, math.hypot(*stds), first.std is None and second.std is None)

    def __str__(self) -> str:
        return f"{self.difference:+.1f}" + ("" if math.isnan(self.spread) else f" (spread {self.spread:.1f})")

    def verdict(self, direction: Direction) -> str:
        if math.isnan(self.spread):
            return "not judged: one seed"
        return self._judged(direction) + (" (one seed)" if self.one_seed else "")

    def _judged(self, direction: Direction) -> str:
        if direction == "not lower":
            return "shows" if self.difference >= -self.spread else "DOES NOT SHOW: lower"
        signed = self.difference if direction == "higher" else -self.difference
        if signed > self.spread:
            return "shows"
        return "DOES NOT SHOW: within the spread" if signed >= -self.spread else "DOES NOT SHOW: the opposite"


def row_line(name: str, rows: Mapping[str, Row]) -> list[str]:
    title, paper = ROWS[name]
    row = rows.get(name)
    if row is None:
        return [title, *["not run"] * 6, paper]
    baseline = rows.get(f"{name.split('_')[0]}_baseline")
    return [
        title,
        f"{row.batch:,}",
        f"{row.steps:,}",
        f"{row.rate:g}",
        str(row),
        str(len(row.top1)),
        "-" if baseline is None else f"{row.mean - baseline.mean:+.1f}",
        paper,
    ]


def effect_line(effect: Effect, rows: Mapping[str, Row]) -> list[str]:
    model = MODELS[effect.after.split("_")[0]]
    if not {effect.before, effect.after} <= rows.keys():
        return [effect.claim, model, effect.figures, "not run", "-"]
    found = Comparison.of(effect.before, effect.after, rows)
    return [effect.claim, model, effect.figures, str(found), found.verdict(effect.paper)]


def goals(rows: Mapping[str, Row]) -> list[str]:
    """The goals that were set before the runs, each with what came out."""
    lines = []
    for model, fp32 in RECIPES_IN_FP32.items():
        baseline, full = f"{model}_baseline", f"{model}_fp16"
        if not {baseline, full, fp32} <= rows.keys():
            lines.append(f"- {MODELS[model]}: not run.")
            continue
        found = Comparison.of(baseline, full, rows)
        limit = GOAL_POINTS if math.isnan(found.spread) else max(found.spread, GOAL_POINTS)
        lines.append(
            f"- {MODELS[model]}: the full recipe at the large batch is {found.difference:+.2f} points from the small "
            f"batch; {'meets' if found.difference >= -limit else 'MISSES'} the goal of at most {limit:.2f} below "
            f"({GOAL_POINTS:g}, or the spread)."
        )
        to_fp32 = Comparison.of(fp32, full, rows)
        outcome = "meets" if to_fp32.difference >= -to_fp32.spread else "MISSES"
        outcome += f" the goal of no worse within the spread of {to_fp32.spread:.2f}"
        if math.isnan(to_fp32.spread):
            outcome = "one seed does not tell whether that is within the spread"
        lines.append(f"- {MODELS[model]}: FP16 is {to_fp32.difference:+.2f} points from FP32; {outcome}.")
    return lines


def how(rows: Mapping[str, Row]) -> str:
    """What the runs have in common."""
    if not rows:
        return "No run is kept yet: see benchmarks/large_batch/README.md."
    machines = sorted({f"{one.cores} cores ({one.cpu})" for row in rows.values() for one in row.hardware})
    hours = sum(row.seconds for row in rows.values()) / 3600
    epochs, sides = ({getattr(row, name) for row in rows.values()} for name in ("epochs", "image_size"))
    return (
        f"CIFAR-10 at {_listed(sides)} pixels, {_listed(epochs)} epochs, 2 ranks on {' or '.join(machines)}, "
        f"{hours:.1f} hours of training in all. Top-1 is that of the last epoch, in percent, "
        "mean ± standard deviation of the seeds."
    )


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def report(rows: Mapping[str, Row]) -> str:
    header = ["row", "batch", "steps", "peak rate", "top-1", "seeds", "from baseline", "paper, ImageNet"]
    tables = "\n\n".join(
        f"{title}:\n\n{table(header, [row_line(name, rows) for name in ROWS if name.startswith(f'{model}_')])}"
        for model, title in MODELS.items()
    )
    claims = table(["claim", "model", "paper", "ours, points", "at this size"], [effect_line(e, rows) for e in EFFECTS])
    return (
        f"{how(rows)}\n\n{tables}\n\n"
        "The paper's figures are of ImageNet at a batch of 64K, its baseline at 256: compare order, not values.\n"
        "The paper's step on bias and BN removes the decay alone; without it they have MLPerf's full rate here.\n"
        "Tags: [abs] and [paper] the paper, [team] the authors' article, [fig] read off a figure, [unc] quoted but\n"
        "unconfirmed.\n\n"
        "What the paper says each change does, against ours. An effect shows if the means differ by more than the\n"
        "spread: the standard deviation of the difference of two runs. Rows with one seed borrow the median deviation\n"
        "of the others.\n\n"
        f"{claims}\n\n"
        "Goals:\n\n" + "\n".join(goals(rows))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", type=Path, help="folders of sweeps, whose finished runs are taken over")
    for sweep in parser.parse_args().sweeps:
        print(f"{sweep}: {keep(sweep, RUNS)} finished runs kept")
    rows = read_rows(RUNS)
    unknown = rows.keys() - ROWS.keys()
    if unknown:
        parser.error(f"{RUNS} has runs of {', '.join(sorted(unknown))}, which are no rows of the table")
    write(
        "large_batch",
        "python benchmarks/large_batch.py",
        {
            name: {"title": title, "model": MODELS[name.split("_")[0]], **asdict(rows[name])}
            for name, (title, _) in ROWS.items()
            if name in rows
        },
        report(rows),
    )


if __name__ == "__main__":
    main()
