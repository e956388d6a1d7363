"""Pictures of FP32 masters, LARS and its rates, and of what the recipe reached."""

import statistics

import torch
from hydra.utils import instantiate
from matplotlib.figure import Figure
from torch import nn

import lightning_fourmin as fm
from drawing import BLUE, GREEN, ORANGE, config, results
from lightning_fourmin.models import build_model
from lightning_fourmin.optim.schedule import GlobalBatch
from lightning_fourmin.svg import MUTED, log_axes, wide_figure

IMAGENET_TRAIN = 1_281_167
MOST_POINTS_BELOW = 10.0
"""Rows of the large-batch table that are further below the first one are told, not drawn."""


def masters() -> tuple[Figure, str]:
    """Share of weights that one LARS step leaves as they were, in FP16 and on FP32 masters, by learning rate."""
    rates = [10.0 ** (exponent / 4) for exponent in range(-12, 7)]
    figure, (axes,) = wide_figure(3.4)
    for name, dtype, color in (("FP16 weights", torch.float16, ORANGE), ("FP32 masters", torch.float32, BLUE)):
        axes.plot(rates, [100 * _share_lost(rate, dtype) for rate in rates], color=color, marker="o", ms=4, label=name)
    log_axes(axes, x_base=10)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("learning rate of LARS (trust coefficient 0.001)")
    axes.set_title("Weights whose update is lost to rounding, %, one step")
    axes.legend()
    return (
        figure,
        "Share of weights that a LARS step does not change, by learning rate, in FP16 and on FP32 masters",
    )


def _share_lost(rate: float, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter((0.05 * torch.randn(20_000, generator=generator)).to(dtype))
    weight.grad = torch.randn(20_000, generator=generator).to(dtype)
    before = weight.detach().clone()
    fm.LARS([weight], lr=rate).step()
    return float((weight.detach() == before).float().mean())


def trust() -> tuple[Figure, str]:
    """Trust ratios of a small AlexNet-BN in its first steps."""
    torch.manual_seed(1)
    net = build_model("alexnet_bn_small", 10)
    optimizer = fm.LARS(fm.param_groups(net, weight_decay=5e-4), lr=1.0)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    seen: list[dict[str, float]] = []
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        seen.append(optimizer.trust_ratios())
    figure, (axes,) = wide_figure(3.4)
    names = list(seen[0])
    for shift, (ratios, label, color) in enumerate(((seen[0], "step 1", BLUE), (seen[-1], "step 10", ORANGE))):
        heights = [ratios[name] for name in names]
        axes.bar([place + 0.38 * shift for place in range(len(names))], heights, 0.36, color=color, label=label)
    log_axes(axes, y_base=10)
    axes.set_xticks([place + 0.19 for place in range(len(names))], [name.removesuffix(".weight") for name in names])
    axes.set_title("Trust ratio of each weight tensor, alexnet_bn_small on 16 random images")
    axes.legend()
    return figure, "Trust ratios of the eight weight tensors of a small AlexNet-BN at its first and tenth step"


def rates() -> tuple[Figure, str]:
    """The learning rates of the ImageNet experiments."""
    figure, (axes,) = wide_figure(3.2)
    for name, color in (
        ("imagenet_resnet50_8k", BLUE),
        ("imagenet_resnet50_64k", ORANGE),
        ("imagenet_alexnet_64k", GREEN),
    ):
        experiment = config("train", f"experiment={name}")
        batch = int(experiment.global_batch)
        per_epoch = IMAGENET_TRAIN // batch
        schedule = instantiate(experiment.schedule, _convert_="all")
        total = per_epoch * int(experiment.trainer.max_epochs)
        plan = schedule.plan(float(experiment.optim.lr), GlobalBatch(batch, 1), per_epoch, total)
        epochs = [number / per_epoch for number in range(0, total, max(1, total // 300))]
        axes.plot(epochs, [plan.lr(round(epoch * per_epoch)) for epoch in epochs], color=color, label=name)
    axes.set_xlabel("epoch")
    axes.set_title("Learning rate of the ImageNet experiments: warm-up, then poly decay")
    axes.legend()
    return figure, "Learning rate by epoch of the three ImageNet experiments"


def large_batch() -> tuple[Figure, str]:
    """Top-1 of each row of the large-batch table: a dot a seed, a bar a mean; what diverged lies off the picture."""
    kept = results("large_batch").values()
    models = list(dict.fromkeys(row["model"] for row in kept))
    rows = {model: [row for row in kept if row["model"] == model] for model in models}
    heights = [len(rows[model]) for model in models]
    figure = Figure(figsize=(9.5, 0.3 * sum(heights) + 0.8 * len(heights)), layout="constrained")
    all_axes = figure.subplots(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, model in zip(all_axes, models, strict=True):
        least = statistics.fmean(rows[model][0]["top1"]) - MOST_POINTS_BELOW
        for place, row in enumerate(rows[model]):
            mean = statistics.fmean(row["top1"])
            if mean < least:
                text = f"\u25c2 {mean:.1f}"
                axes.annotate(text, (0.01, place), xycoords=("axes fraction", "data"), va="center", color=ORANGE)
                continue
            axes.plot(row["top1"], [place] * len(row["top1"]), "o", color=BLUE, ms=6, mew=0, alpha=0.5)
            axes.plot([mean], [place], "|", color=ORANGE, ms=14, mew=2)
        axes.axvline(statistics.fmean(rows[model][0]["top1"]), color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
        axes.set_yticks(range(len(rows[model])), [f"{row['title']} ({row['batch']:,})" for row in rows[model]])
        axes.set_ylim(len(rows[model]) - 0.5, -0.5)
        axes.set_title(f"{model}: top-1, %")
    return figure, "Top-1 of each row of the large-batch table on CIFAR-10, by model"
