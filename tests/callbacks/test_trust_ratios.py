"""LARS under Lightning's Trainer: same weights as a plain loop, and its trust ratios in the logs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fourmin as fm
from tests.support.pool import RankPool
from tests.support.training import Regression, data, rank_trainer

SAMPLES = torch.randn(24, 6, generator=torch.Generator().manual_seed(5))
BATCH_SIZE = 2


class Warming(LightningModule):
    """LARS on groups, with a rate that grows every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = fm.LARS(fm.param_groups(self, 1e-2), lr=2.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(Warming):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [fm.LARS(fm.param_groups(self.net[i], 0.0), lr=1.0) for i in (0, 2)]


class PlainSGD(Warming):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(SAMPLES), BATCH_SIZE)


def trainer(folder: Path, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": [CSVLogger(folder, name=name, version="") for name in ("first", "second")],
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**defaults | kwargs)


def logged(folder: Path) -> list[dict[str, str]]:
    """The lines of the two loggers, which must be the same."""
    first, second = ((folder / name / "metrics.csv").read_text() for name in ("first", "second"))
    assert first == second
    header, *lines = [line.split(",") for line in first.splitlines()]
    return [dict(zip(header, line, strict=True)) for line in lines]


def plain_loop(num_accumulated: int = 1) -> tuple[list[Tensor], list[dict[str, float]]]:
    """The weights and the ratios of every step without Lightning."""
    module = Warming()
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    ratios = []
    for i, batch in enumerate(loader()):
        (module.training_step(batch, i) / num_accumulated).backward()
        if (i + 1) % num_accumulated == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ratios.append(optimizer.trust_ratios())
    return list(module.parameters()), ratios


@pytest.mark.parametrize(("every", "num_accumulated"), [(1, 1), (3, 1), (2, 2)])
def test_trainer_gives_the_weights_and_ratios_of_a_plain_loop(tmp_path: Path, every: int, num_accumulated: int) -> None:
    module = Warming()
    fit = trainer(
        tmp_path, callbacks=[fm.TrustRatioMonitor()], log_every_n_steps=every, accumulate_grad_batches=num_accumulated
    )
    fit.fit(module, loader())
    weights, ratios = plain_loop(num_accumulated)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), weights, strict=True))
    lines = logged(tmp_path)
    assert [int(line["step"]) for line in lines] == list(range(every - 1, len(ratios), every))
    for line in lines:
        found = {name: float(value) for name, value in line.items() if name.startswith("trust_ratio/")}
        expected = ratios[int(line["step"])]
        assert expected.keys() == {"net.0.weight", "net.2.weight"}
        assert found == pytest.approx({f"trust_ratio/{name}": ratio for name, ratio in expected.items()}, rel=1e-6)


def test_two_optimizers_are_told_apart(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[fm.TrustRatioMonitor()]).fit(TwoOptimizers(), loader())
    lines = logged(tmp_path)
    assert len(lines) == len(SAMPLES) // BATCH_SIZE
    assert {name for name in lines[0] if name.startswith("trust")} == {"trust_ratio/0/weight", "trust_ratio/1/weight"}


def test_monitor_needs_lars(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TrustRatioMonitor needs a LARS optimizer, .* gave SGD: return"):
        trainer(tmp_path, callbacks=[fm.TrustRatioMonitor()]).fit(PlainSGD(), loader())


class LARSRegression(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fm.LARS(fm.param_groups(self, 1e-2), lr=5.0)


def fit_on_ranks() -> tuple[list[list[float]], dict[str, float]]:
    torch.manual_seed(0)
    module = LARSRegression(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1)))
    fit = rank_trainer("fourmin", max_epochs=1, log_every_n_steps=1, callbacks=[fm.TrustRatioMonitor()])
    fit.fit(module, data(4))
    return [p.flatten().tolist() for p in module.parameters()], {k: float(v) for k, v in fit.callback_metrics.items()}


def test_ranks_have_the_same_ratios_and_weights(ranks: RankPool) -> None:
    first, second = ranks.run(fit_on_ranks, nodes=[1, 1])
    assert first == second
    assert first[1].keys() == {"trust_ratio/net.0.weight", "trust_ratio/net.1.weight"}
