"""The paper's first claim on a laptop: LARS in plain FP16 stalls, FP16 compute with FP32 LARS updates does not.

Trains the same net on scikit-learn's digits, from the same start, in three ways, and draws what happens:

    FP32           everything in FP32
    naive FP16     weights, gradients and updates in FP16, as in Lightning's own precision="16-true"
    FourMin FP16   forward and backward in FP16, LARS on FP32 masters (FourMinPrecision)

Example: python examples/fp16_lars_stall.py --picture fp16_lars_stall.png     # a minute on 2 cores
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_fourmin as fm

# Naive FP16 is no part of the package: the benchmarks keep it, and a script finds only what lies beside it.
sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.naive_half import NaiveHalfPrecision

WAYS: dict[str, Callable[[], Precision]] = {
    "FP32": Precision,
    "naive FP16": NaiveHalfPrecision,
    "FourMin FP16": lambda: fm.FourMinPrecision(dtype="fp16"),
}
PEAK_RATE = 0.01
"""With a trust coefficient of 0.001 and momentum 0.9 a step moves a weight by 0.0001 of its size; FP16 weights are
0.0005 to 0.001 of their size apart."""
BATCH_SIZE = 512


class Digits(L.LightningModule):
    """A net whose every parameter is a weight that LARS adapts, with warm-up and poly decay."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.net = nn.Sequential(
            nn.Linear(64, 512, bias=False),
            nn.BatchNorm1d(512, affine=False),
            nn.ReLU(),
            nn.Linear(512, 512, bias=False),
            nn.BatchNorm1d(512, affine=False),
            nn.ReLU(),
            nn.Linear(512, 10, bias=False),
            nn.BatchNorm1d(10, affine=False),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images).float(), labels)

    def configure_optimizers(self) -> Any:
        optimizer = fm.LARS(fm.param_groups(self, weight_decay=1e-4), lr=PEAK_RATE)
        warm_up = max(1, self.num_steps // 10)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (1 - step / self.num_steps) ** 2)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Curves(L.Callback):
    """The loss of every step, and the share of weights that its update was lost on: they are as they were before."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lost_updates: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self._before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        after = nn.utils.parameters_to_vector(module.parameters()).detach()
        self.losses.append(outputs["loss"].item())
        self.lost_updates.append((after == self._before).float().mean().item())


def train(way: str, num_steps: int, show_progress: bool = True) -> Curves:
    """Trains on one batch again and again, so that nothing but the precision differs."""
    L.seed_everything(1, verbose=False)
    images, labels = load_digits(return_X_y=True)
    batch = [torch.tensor(images[:BATCH_SIZE], dtype=torch.float32) / 16, torch.tensor(labels[:BATCH_SIZE])]
    curves = Curves()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[WAYS[way]()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=show_progress,
        callbacks=[curves],
    )
    trainer.fit(Digits(num_steps), DataLoader([batch] * num_steps, batch_size=None))
    return curves


def draw(curves: dict[str, Curves], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, lost) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (way, curve), style in zip(curves.items(), ("-", "-", "--"), strict=True):
        losses.plot(curve.losses, style, label=way)
        lost.plot([100 * share for share in curve.lost_updates], style, label=way)
    losses.set(title="Training loss", xlabel="step", ylim=(0, None))
    lost.set(title="Weights whose update was lost (%)", xlabel="step", ylim=(-3, 103))
    losses.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--picture", type=Path, default=Path("fp16_lars_stall.png"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    warnings.filterwarnings("ignore", "The '.*' does not have many workers")
    curves = {}
    for way in WAYS:
        print(f"{way}: {arguments.steps} steps")
        curves[way] = train(way, arguments.steps)
    print(f"\n{'':14}{'first loss':>12}{'last loss':>12}{'updates lost':>16}")
    for way, curve in curves.items():
        share = sum(curve.lost_updates) / len(curve.lost_updates)
        print(f"{way:14}{curve.losses[0]:12.3f}{curve.losses[-1]:12.3f}{share:16.1%}")
    draw(curves, arguments.picture)
    print(f"\npicture: {arguments.picture}")


if __name__ == "__main__":
    main()
