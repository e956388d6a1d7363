"""DataMonitor in one process; `tests/data/test_data_ranks.py` has it on several ranks."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_fourmin.callbacks.data_monitor import DataMonitor
from tests.support.counting import Counting, numbers_module
from tests.support.shards import write_numbers

BATCH_SIZE = 4


def logged(folder: Path, *data: Any, **kwargs: Any) -> list[dict[str, str]]:
    """The rows of a fit that the monitor logged."""
    logger = CSVLogger(folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=[DataMonitor()],
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(Counting(), *data)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["data_wait_ms"]]


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_numbers(tmp_path, [9, 2, 12])
    return str(tmp_path)


def test_waiting_and_skipped_samples_are_logged(path: str, tmp_path: Path) -> None:
    rows = logged(tmp_path, numbers_module(path, BATCH_SIZE), log_every_n_steps=2, max_epochs=1)
    assert [int(row["step"]) for row in rows] == [1, 3]
    assert all(float(row["data_wait_ms"]) > 0 for row in rows)
    assert all(float(row["data_skipped"]) == 0 for row in rows)


def test_skipped_samples_are_counted(tmp_path: Path) -> None:
    write_numbers(tmp_path, [20], damaged=(3, 4, 5))
    data = numbers_module(str(tmp_path), BATCH_SIZE, on_error="skip")
    rows = logged(tmp_path, data, log_every_n_steps=5, max_epochs=2)
    assert [float(row["data_skipped"]) for row in rows] == [3, 6]


def test_a_reloaded_loader_is_measured_from_its_start(path: str, tmp_path: Path) -> None:
    """Its waiting begins at zero again, and so do the batches since the last row."""
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "log_every_n_steps": 4}
    rows = logged(tmp_path, numbers_module(path, BATCH_SIZE), **options)
    assert [int(row["step"]) for row in rows] == [3, 8, 13]
    assert all(float(row["data_wait_ms"]) > 0 for row in rows)


def test_other_loaders_are_left_alone(tmp_path: Path) -> None:
    loader = DataLoader(torch.arange(8), 4)
    assert logged(tmp_path, loader, loader, log_every_n_steps=1, max_epochs=1) == []
