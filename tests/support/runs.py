"""Folders of runs as `fourmin train` leaves them."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from lightning_fourmin.runs.record import (
    BucketRecord,
    Hardware,
    ModelSize,
    RunRecord,
    Summary,
    TableRecord,
    TableRowRecord,
)

ON_THE_WIRE = (2_097_152, "float16", "dense", "hierarchical", 2, 12.5, "rounded to fp16")
RUN = RunRecord(
    name="digits",
    command="fourmin train optim.lr=2",
    started="2026-11-16T11:16:45+00:00",
    seconds=61.25,
    status="done",
    versions={"lightning": "2.6.6", "torch": "2.13.0"},
    hardware=Hardware("AMD EPYC 7B13", 2, 15.6),
    arithmetic=("2 ranks x 32 images = global batch 64.", "Rate 2 = base rate 8 x 64 / 256."),
    model=ModelSize("alexnet_bn_small", 1_234_567, 26),
    topology="1 group of 2 ranks",
    world_size=2,
    fusion_plan=(
        BucketRecord(3, 4_194_304, "float32", "fc8.bias", "fc7.bias", *ON_THE_WIRE),
        BucketRecord(23, 744_000, "float32", "fc7.weight", "conv1.weight", *ON_THE_WIRE),
    ),
    table=TableRecord(
        "cost model",
        "1x2",
        "gloo",
        (
            TableRowRecord(256, {"ring": 0.321, "hierarchical": 0.123}, "hierarchical"),
            TableRowRecord(1024, {"ring": 0.456, "hierarchical": 0.789}, "ring"),
        ),
    ),
    summary=Summary(
        top1=0.9778,
        top5=0.9991,
        val_loss=0.0812,
        epochs=8,
        steps=176,
        images_per_s=2345.6,
        S=1300.4,
        N=2,
        e=0.901,
        e_low=0.88,
        e_high=0.932,
        step_ms=27.3,
        exposed_ms=2.7,
        skipped_steps=3,
        loss_scale=16384.0,
    ),
)


CONFIG = "name: digits\noptim:\n  lr: 2\n"


def write_run(
    folder: Path, record: RunRecord = RUN, steps: int = 40, layers: tuple[str, ...] = ("conv1.weight", "fc6.weight")
) -> None:
    """A run that logged every step and validated every tenth."""
    record.write(folder)
    (folder / "config.yaml").write_text(CONFIG)
    rows = list(_rows(steps, layers))
    names = sorted({name for row in rows for name in row})
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _rows(steps: int, layers: tuple[str, ...]) -> Iterator[dict[str, float]]:
    for step in range(steps):
        progress = step / steps
        yield {
            "step": step,
            "epoch": step // 10,
            "train/loss": 2.3 * math.exp(-3 * progress) + 0.1 * math.sin(step),
            "lr": 2 * (1 - progress) ** 2,
            "fourmin/loss_scale": 2.0 ** (16 - step // 20),
            "fourmin/skipped_steps": step // 20,
            **{f"trust_ratio/{name}": 0.001 * (1 + i + progress) for i, name in enumerate(layers)},
        }
        yield {
            "step": step,
            "fourmin/S": 1300.4,
            "fourmin/N": 2,
            "fourmin/e": 0.902,
            "fourmin/T": 2345.6,
            "fourmin/step_ms": 27.3 if step else 400.0,
            "fourmin/comm_ms": 9.1,
            "fourmin/exposed_ms": 2.7,
        }
        if step % 10 == 9:
            accuracy = 1 - math.exp(-4 * progress)
            yield {"step": step, "epoch": step // 10, "val/loss": 1 - accuracy, "val/top1": accuracy, "val/top5": 0.99}
