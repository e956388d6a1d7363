"""Counts the collectives of a training step that the main thread waits for: fourmin against ddp, 2 ranks.

Example: .venv/bin/python benchmarks/collectives.py
"""

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from results import table, write

STEPS = range(3, 7)
VARIANTS = ("ddp", "fourmin")


class CountCollectives(L.Callback):
    """Profiles the main thread over a few steps and counts what it asked of the process group."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS.start:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()
        if batch_idx == STEPS.stop:
            self._profile.stop()
            names = [event.name for event in self._profile.events() if event.name.startswith("gloo:")]
            self.counts = Counter({name.removeprefix("gloo:"): n / len(STEPS) for name, n in Counter(names).items()})


def count(strategy: str, sync_dist: bool) -> dict[str, float]:
    """Collectives a step on this rank."""
    from models import FullyConnectedHeavy
    from step_rank import Classifier

    class Logging(Classifier):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if sync_dist:
                self.log("loss", loss, sync_dist=True)
            return loss

    counter = CountCollectives()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS.stop + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counter],
    )
    data = torch.utils.data.TensorDataset(torch.randn(256, 3, 32, 32), torch.arange(256) % 10)
    trainer.fit(Logging(FullyConnectedHeavy()), torch.utils.data.DataLoader(data, 8))
    return dict(counter.counts)


def main() -> None:
    if "--rank" in sys.argv:
        import lightning_fourmin  # noqa: F401

        found = {f"{s}{', sync_dist' * sync}": count(s, bool(sync)) for sync in (0, 1) for s in VARIANTS}
        if torch.distributed.get_rank() == 0:
            print("RESULT", json.dumps(found))
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    command = [*launch, f"--master_port={port}", str(Path(__file__)), "--rank"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if output.returncode:
        sys.exit(output.stderr[-3000:])
    found = json.loads(output.stdout.split("RESULT ")[1])
    kinds = sorted({kind for counts in found.values() for kind in counts})
    rows = [[name, *(f"{counts.get(kind, 0):g}" for kind in kinds)] for name, counts in found.items()]
    text = (
        "Collectives a step that the main thread starts. Those of ddp include one all-reduce a bucket; fourmin's\n"
        "buckets go through its engine's threads. The broadcast that remains is Lightning's own: its SIGTERM check.\n\n"
    )
    write("collectives", "python benchmarks/collectives.py", found, text + table(["strategy", *kinds], rows))


if __name__ == "__main__":
    main()
