"""Folders of runs as `fourmin train` leaves them."""

from lightning_fourmin.report.run_files import (
    BucketRecord,
    Hardware,
    ModelSize,
    RunRecord,
    Summary,
    TableRecord,
    TableRowRecord,
)

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
        BucketRecord(3, 4_194_304, "float32", "fc8.bias", "fc7.bias"),
        BucketRecord(23, 744_000, "float32", "fc7.weight", "conv1.weight"),
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
        e=0.902,
        step_ms=27.3,
        exposed_ms=2.7,
        skipped_steps=3,
        loss_scale=16384.0,
    ),
)
