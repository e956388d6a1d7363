"""What a run tells of itself while it trains."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fourmin.runs import recorder
from lightning_fourmin.runs.recorder import RunRecorder
from tests.support.runs import RUN
from tests.support.training import Regression


@pytest.mark.parametrize(("long_s", "lines"), [(3600.0, 1), (0.0, 2)])
def test_the_length_of_an_epoch_is_told_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    long_s: float,
    lines: int,
) -> None:
    monkeypatch.setattr(recorder, "TIMED_S", 0.0)
    monkeypatch.setattr(recorder, "LONG_EPOCH_S", long_s)
    RUN.write(tmp_path)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RunRecorder(tmp_path)],
    )
    trainer.fit(Regression(nn.Linear(4, 1)), DataLoader(TensorDataset(torch.randn(8, 4)), 2))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fourmin train: ")]
    assert len(told) == lines
    assert " ms a step, about 0 s an epoch, 0 s to the end without validation" in told[0]
