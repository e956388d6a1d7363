"""A Lightning project with fourmin plugged in: two lines are new. Trains on scikit-learn's digits with 2 CPU ranks."""

import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_fourmin  # noqa: F401  (new, line 1: registers the strategy)


class DigitClassifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def main() -> None:
    warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    warnings.filterwarnings("ignore", "The '.*' does not have many workers")
    L.seed_everything(1, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, validation = random_split(data, [1437, 360])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="fourmin",  # new, line 2
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitClassifier(), DataLoader(training, 32, shuffle=True), DataLoader(validation, 60))
    if trainer.is_global_zero:
        print(f"validation accuracy {float(trainer.callback_metrics['accuracy']):.1%} with {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
