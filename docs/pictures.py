"""Draws the pictures of the documentation from the objects of the package: `python docs/pictures.py`.

Numbers come from the plans, tables, schedules and optimizers that a run uses, so a picture changes when the code does.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from drawing import BLUE, GREEN, ORANGE, PURPLE, YELLOW, config, results
from lightning_fourmin.allreduce.algorithms import ALGORITHMS, STAGES
from lightning_fourmin.allreduce.buckets import MIB, FusionPlan
from lightning_fourmin.allreduce.table import AllReduceTable, default_fusion_mb
from lightning_fourmin.allreduce.topology import Topology
from lightning_fourmin.models import build_model
from lightning_fourmin.simulate.cluster import Cluster
from lightning_fourmin.simulate.picture import plot_step, step_legend
from lightning_fourmin.simulate.roofline import peak_profile
from lightning_fourmin.simulate.scenario import Scenario, scaling_curve, techniques
from lightning_fourmin.svg import FAINT, INK, MUTED, SERIES, log_axes, style, to_svg, wide_figure
from lightning_fourmin.tune.plot import plot_rows, plot_switch_points
from pictures_of_recipe import large_batch, masters, rates, trust

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "pictures"
STEPS = results("step")
COLORS = dict(zip(ALGORITHMS, SERIES, strict=False))
NODES_OF_4 = Topology.build([0] * 4 + [1] * 4)


@cache
def scenario() -> Scenario:
    """ResNet-50 on 1024 ranks of the paper's cluster: `fourmin plan fusion_mb=16`."""
    cluster = Cluster.from_config(config("plan").cluster)
    assert cluster.reference is not None
    batch_size = cluster.reference.batch_size
    with torch.device("meta"):
        net = build_model(cluster.reference.model, 1000)
        peak = peak_profile(net, torch.empty(batch_size, 3, 224, 224), cluster.device)
    profile = peak.scaled(batch_size / cluster.reference.samples_per_s / peak.compute_s)
    parameters = list(net.named_parameters())
    return Scenario(parameters, profile, cluster, 1024, fusion_mb=16.0, wire_dtype=torch.float16)


def fusion() -> tuple[Figure, str]:
    """ResNet-50's gradients in ready order, cut at three thresholds."""
    parameters = list(build_model("resnet50", 1000).named_parameters())
    figure, (axes,) = wide_figure(2.6)
    labels = []
    for row, threshold_mb in enumerate((0.0, default_fusion_mb(NODES_OF_4, "gloo"), 16.0)):
        buckets = FusionPlan.build(parameters, threshold_mb).buckets
        left_mb = 0.0
        for bucket in buckets:
            width_mb = bucket.num_bytes / MIB
            color = ORANGE if len(bucket.names) == 1 else BLUE
            axes.barh(row, max(0.8 * width_mb, width_mb - 0.15), left=left_mb, height=0.62, color=color, linewidth=0)
            left_mb += width_mb
        name = "every gradient alone" if threshold_mb == 0 else f"fusion_mb={threshold_mb:g}"
        labels.append(f"{name}\n{len(buckets)} messages")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.005)
    axes.grid(False)
    axes.set_xlabel("MiB of gradients, in the order in which backward makes them ready (fc first, stem last)")
    axes.set_title("Messages of ResNet-50")
    handles = [Patch(color=ORANGE, label="one gradient"), Patch(color=BLUE, label="several, fused")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return figure, "Gradients of ResNet-50 in ready order, cut into buckets at three fusion thresholds"


def phases() -> tuple[Figure, str]:
    """Who meets whom in each phase, on 2 nodes of 4 ranks."""
    topology = NODES_OF_4
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    rows: Any = figure.subplots(len(ALGORITHMS), len(STAGES))
    for algorithm, row in zip(ALGORITHMS, rows, strict=True):
        for stage, axes in zip(STAGES, row, strict=True):
            _draw_phase(axes, algorithm, stage, topology)
            if stage == STAGES[0]:
                axes.set_ylabel(algorithm, color=COLORS[algorithm], rotation=0, ha="right", va="center")
            if algorithm == next(iter(ALGORITHMS)):
                axes.set_title(stage)
    return figure, "The ranks that meet in each phase of ring, hierarchical and torus all-reduce, 2 nodes of 4 ranks"


def _draw_phase(axes: "Axes", algorithm: str, stage: str, topology: Topology) -> None:
    def place(rank: int) -> tuple[float, float]:
        return topology.group_of(rank).index(rank), -topology.node_of[rank]

    for rank in range(topology.world_size):
        x, y = place(rank)
        met = ALGORITHMS[algorithm].peers(stage, topology, rank)
        busy = rank in met and (algorithm != "ring" or stage == "scatter")
        if busy:
            to_x, to_y = place(met[(met.index(rank) + 1) % len(met)])
            # The line from the last of a row back to the first goes around those between.
            bend = 0.0 if to_y != y or abs(to_x - x) == 1 else 0.22 if y == 0 else -0.22
            arrow = {"arrowstyle": "-", "color": COLORS[algorithm], "lw": 1.8, "connectionstyle": f"arc3,rad={bend}"}
            axes.annotate("", (to_x, to_y), (x, y), arrowprops=arrow, zorder=2)
        axes.plot(x, y, "o", ms=14, color=FAINT if busy else "none", markeredgecolor=FAINT, zorder=3)
        axes.annotate(str(rank), (x, y), ha="center", va="center", color=INK if busy else MUTED, fontsize=9, zorder=4)
    axes.set(xlim=(-0.7, 3.7), ylim=(-1.7, 0.7), xticks=[], yticks=[])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)


def steps() -> tuple[Figure, str]:
    """Steps of each algorithm as rings, by the number of ranks, nodes of 8."""
    figure, (axes,) = wide_figure(3.4)
    worlds = [2**n for n in range(4, 13)]
    nodes = {world: Topology.build([rank // 8 for rank in range(world)]) for world in worlds}
    for algorithm in ALGORITHMS:
        counts = [ALGORITHMS[algorithm].num_steps(nodes[world]) for world in worlds]
        axes.plot(worlds, counts, marker="o", ms=4, color=COLORS[algorithm])
        text, up = f"{algorithm}, {counts[-1]:,}", {"hierarchical": 6, "torus": -6}.get(algorithm, 0)
        axes.annotate(text, (worlds[-1], counts[-1]), (8, up), textcoords="offset points", va="center")
    log_axes(axes, x_base=2, y_base=10)
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
    axes.margins(x=0.14)
    axes.set_xlabel("ranks, 8 a node")
    axes.set_title("Steps of one all-reduce, every collective counted as a ring")
    return figure, "Number of steps of ring, hierarchical and torus all-reduce from 16 to 4096 ranks"


def allreduce() -> tuple[Figure, str]:
    """The cost model's table for two clusters, with the sizes at which the choice changes."""
    figure, both = wide_figure(3.8, 2)
    clusters = (
        ("gloo", NODES_OF_4),
        ("nccl", Topology.build([n for n in range(16) for _ in range(8)])),
    )
    for axes, (backend, topology) in zip(both, clusters, strict=True):
        table = AllReduceTable.from_cost_model(topology, backend)
        plot_rows(axes, table.rows, [table.choose(row.num_bytes) for row in table.rows])
        plot_switch_points(axes, table)
        axes.set_xlabel("bytes on the wire")
        axes.set_title(f"{topology.num_nodes} nodes x {topology.largest_group} ranks, {backend}: ms")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return figure, "Milliseconds of each all-reduce by size, from the cost model, and where the choice changes"


def step() -> tuple[Figure, str]:
    """A simulated step of ResNet-50 on 1024 ranks, without and with the paper's techniques."""
    fused = scenario()
    plain = replace(fused, fusion_mb=0.0, algorithm="ring")
    figure = Figure(figsize=(9.5, 5.0), layout="constrained")
    rows: Any = figure.subplots(2, 1)
    titles = ("Every gradient alone, ring", f"Fused (fusion_mb={fused.fusion_mb:g}), hybrid")
    for axes, case, title in zip(rows, (plain, fused), titles, strict=True):
        plot_step(axes, case.step.spans, ("main", "reduce", "scatter", "broadcast"))
        seen = case.prediction
        axes.set_title(f"{title}: {seen.step_ms:,.0f} ms a step, {seen.exposed_ms:,.0f} ms exposed, e = {seen.e:.2f}")
    figure.legend(handles=step_legend(), loc="outside upper right", ncols=4)
    rows[-1].set_xlabel("ms; 1024 ranks, 64 images each, FP16, the paper's cluster")
    return (
        figure,
        "Simulated training step of ResNet-50 on 1024 ranks, without fusion and with fusion and hybrid all-reduce",
    )


def scaling() -> tuple[Figure, str]:
    """Predicted efficiency by ranks, with all techniques and without each."""
    figure, (axes,) = wide_figure(3.8)
    _draw_scaling(axes)
    axes.set_title("Predicted efficiency e of ResNet-50 on the paper's cluster, each against its own S")
    return figure, "Predicted scaling efficiency from 1 to 4096 ranks, with all techniques, without each, and with none"


def _draw_scaling(axes: "Axes") -> None:
    known = scenario().cluster.reference
    assert known is not None
    assert known.fp32_samples_per_s is not None
    fp32_profile = scenario().profile.scaled(known.samples_per_s / known.fp32_samples_per_s)
    cases = techniques(scenario(), fp32_profile)
    curves = {name: scaling_curve(case, most_ranks=4096) for name, case in cases.items()}
    for (name, curve), color in zip(curves.items(), (BLUE, ORANGE, PURPLE, GREEN, MUTED), strict=True):
        # "all" is drawn first: a band that shows under a curve which nearly covers it.
        width = 6 if name == "all" else 1.5
        ranks, e = [point.N for point in curve], [point.e for point in curve]
        axes.plot(ranks, e, marker="o", ms=4, lw=width, color=color, label=name)
    log_axes(axes, x_base=2)
    axes.set_xticks(ranks[::3], [f"{number:,}" for number in ranks[::3]])
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("ranks, 8 a node, 64 images each, fusion_mb=16")
    axes.legend(loc="lower left")


def overview() -> tuple[Figure, str]:
    """What was measured on emulated clusters, beside what is predicted for the paper's."""
    figure, (measured, predicted) = wide_figure(3.6, 2)
    ways = {"ddp": ("ddp", MUTED), "ddp_fp16": ("ddp, FP16 hook", YELLOW), "fourmin": ("fourmin", GREEN)}
    ways["fourmin_fp16"] = ("fourmin, FP16 wire", BLUE)
    clusters = ("2x2", "2x4", "4x2")
    for place, (way, (label, color)) in enumerate(ways.items()):
        steps_ms = [statistics.median(STEPS[f"{cluster}_200mbit_fc_heavy"][way]) for cluster in clusters]
        bars = measured.bar([number + 0.21 * place for number in range(3)], steps_ms, 0.19, color=color, label=label)
        measured.bar_label(bars, fmt="%.0f", fontsize=8, color=INK)
    measured.set_xticks([number + 0.315 for number in range(3)], [cluster.replace("x", " x ") for cluster in clusters])
    measured.set_xlabel("emulated nodes x ranks, 200 Mbit/s")
    measured.set_title("Measured: ms a step")
    measured.set_ylim(0, 1.35 * max(statistics.median(STEPS[f"{c}_200mbit_fc_heavy"]["ddp"]) for c in clusters))
    measured.legend(loc="upper left", ncols=2, fontsize=9)
    _draw_scaling(predicted)
    predicted.set_title("Predicted: efficiency of ResNet-50")
    return figure, "Measured steps of ddp and fourmin on three emulated clusters; predicted efficiency up to 4096 ranks"


PICTURES: tuple[Callable[[], tuple[Figure, str]], ...] = (
    overview, fusion, phases, steps, allreduce, step, scaling, masters, trust, rates, large_batch,
)  # fmt: skip


def draw_all(folder: Path) -> None:
    """Writes every picture; the same code gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        for picture in PICTURES:
            figure, label = picture()
            text = to_svg(figure, picture.__name__, label, standalone=True)
            (folder / f"{picture.__name__}.svg").write_text(text + "\n")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
