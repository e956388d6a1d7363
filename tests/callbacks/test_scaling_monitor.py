"""T = S * N * e as it is logged: what counts as waiting, whom the others wait for, and under which Trainers."""

import csv
import math
import time
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fourmin import FourMinStrategy, ScalingMonitor
from lightning_fourmin.allreduce.measure import BucketTimes, Meter, Spans, Stamp, TakenTimes
from lightning_fourmin.callbacks.scaling_monitor import ScalingSummary, _Step, summarize
from lightning_fourmin.errors import LostRankError
from tests.strategy.test_ddp_features import TwoOptimizers
from tests.support.parity import Net, images
from tests.support.pool import RankPool
from tests.support.ranks import current_case
from tests.support.training import Regression, data, rank_trainer

FIELDS = {f"fourmin/{name}" for name in ScalingSummary.__dataclass_fields__}
WITHOUT_ENGINE = {f"fourmin/{name}" for name in ("N", "T", "step_ms")}


def communication(*buckets: tuple[int, float, float, float], waits: tuple[tuple[float, float], ...] = ()) -> Any:
    """Of buckets given as backward pass, handed over, handed on, done."""
    times = tuple(BucketTimes(backward, 100, *map(stamp, moments)) for backward, *moments in buckets)
    return TakenTimes(times, tuple((stamp(start), stamp(stop)) for start, stop in waits)).communication()


def stamp(seconds: float) -> Stamp:
    return Stamp(round(seconds * 1e9))


def test_exposed_is_what_the_main_thread_cannot_compute() -> None:
    hidden, last = (1, 10.0, 10.5, 12.0), (1, 14.0, 14.25, 17.0)
    assert communication(last) == (3.0, 3.0, 100)
    # The first is done under backward, but for the half second in which the main thread starts it.
    assert communication(hidden, last) == (0.5 + 3.0, 2.0 + 3.0, 200)
    assert communication(hidden, last, waits=((1.0, 2.0), (20.0, 23.0))).exposed_s == 7.5


def test_overlapping_buckets_are_busy_once() -> None:
    assert communication((1, 0.0, 0.0, 5.0), (1, 2.0, 2.0, 6.0), (1, 3.0, 3.0, 9.0)).busy_s == 9.0


def test_every_backward_pass_of_a_step_is_exposed() -> None:
    assert communication((1, 0.0, 0.0, 2.0), (2, 5.0, 5.0, 6.5)) == (3.5, 3.5, 200)


def test_validation_in_the_middle_of_a_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([20.0, 50.0])
    monkeypatch.setattr("lightning_fourmin.callbacks.scaling_monitor.time.perf_counter", lambda: next(clock))
    monitor, nobody = ScalingMonitor(), cast(Any, None)
    monitor._start_s, monitor._num_samples = 15.0, 8
    spans = Spans(torch.device("cpu"))
    monitor._meter = meter = Meter(spans)
    spans.listen(meter)
    monitor.on_validation_start(nobody, nobody)
    with meter.waiting():
        pass
    monitor.on_validation_end(nobody, nobody)
    assert monitor._start_s == 45.0
    assert meter.take().waits == ()


def test_nothing_under_way_costs_nothing() -> None:
    assert communication() == (0.0, 0.0, 0)


def test_summary_of_ranks() -> None:
    """Three ranks of 8 samples; rank 1 computes longest, the others wait for it."""
    steps = [_Step(8, 0.1, busy_s=0.05, num_bytes=1_000_000, e=e, e_low=e - 0.03, e_high=e) for e in (0.5, 0.9, 0.4)]
    found = summarize(steps)
    assert (found.N, found.slowest_rank) == (3, 1)
    assert pytest.approx(240.0) == found.T
    assert (found.e, found.e_low, found.e_high) == pytest.approx((0.6, 0.57, 0.6))
    assert found.S * found.N * found.e == pytest.approx(found.T)
    assert found.slowest_wait_ms == pytest.approx(90 - 45)
    assert found.bus_mb_per_s == pytest.approx(2 * 2 / 3 * 1.0 / 0.05)
    assert (found.step_ms, found.comm_ms, found.exposed_ms) == pytest.approx((100, 50, 40))


def test_a_rank_that_waits_for_nobody_has_all_of_its_step() -> None:
    """No figure is cut off at 1 or 0 to look plausible: what is logged is what was measured."""
    assert summarize([_Step(8, 0.1, 0.0, 0, e=1.0)]).e == 1.0
    assert summarize([_Step(8, 0.1, 0.05, 100, e=1.02)] * 2).e == 1.02


def test_summary_where_communication_is_not_known() -> None:
    found = summarize([_Step(8, 0.1, math.nan, 0, math.nan)] * 2)
    assert (pytest.approx(160), 2) == (found.T, found.N)
    assert found.S is found.e is found.exposed_ms is found.comm_ms is found.slowest_rank is None


class Slow(Callback):
    """Keeps one rank busy: in its forward pass, or after the optimizer step, where the others are ahead of it."""

    def __init__(self, rank: int, hook: str) -> None:
        self._rank, self._hook = rank, hook

    def _pause(self, hook: str) -> None:
        if current_case().rank == self._rank and self._hook == hook:
            time.sleep(0.3)

    def on_train_batch_start(self, *_: Any) -> None:
        self._pause("start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._pause("end")


def fit(
    strategy: str, module: LightningModule | None = None, callbacks: tuple[Callback, ...] = (), **kwargs: Any
) -> tuple[ScalingSummary | None, dict[str, float], dict[str, float]]:
    """The summary, the metrics that callbacks see, and those of the progress bar."""
    monitor = ScalingMonitor()
    defaults: dict[str, Any] = {"max_steps": 6, "log_every_n_steps": 3}
    trainer = rank_trainer(strategy, callbacks=[*callbacks, monitor], **defaults | kwargs)
    trainer.fit(Net() if module is None else module, images(max(6, kwargs.get("max_steps", 6))))
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return monitor.summary, metrics, {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def slow_fit(rank: int, hook: str) -> ScalingSummary | None:
    return fit("fourmin", callbacks=(Slow(rank, hook),), max_steps=9)[0]


@pytest.mark.parametrize(("rank", "hook"), [(1, "start"), (2, "end"), (0, "end")])
def test_the_rank_that_the_others_wait_for_is_named(ranks: RankPool, rank: int, hook: str) -> None:
    summaries = ranks.run(slow_fit, rank, hook, nodes=[2, 1])
    assert summaries[0] == summaries[1] == summaries[2]
    assert summaries[0].slowest_rank == rank
    assert summaries[0].N == 3


def fits_with_loggers(folder: Path) -> tuple[Any, ...]:
    both = [CSVLogger(folder / name, name="", version="") for name in ("one", "two")]
    logged = fit("fourmin", logger=both)
    return logged, fit("fourmin", accumulate_grad_batches=3, max_steps=2, log_every_n_steps=1)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["fourmin/e"]]


def test_values_reach_loggers_progress_bar_and_summary(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(fits_with_loggers, tmp_path, nodes=[1, 1])
    (summary, metrics, bar), (accumulated, _, _) = answers[0]
    assert answers[1][0] == answers[0][0], "every rank gets the same values"
    for name in ("one", "two"):
        logged = rows(tmp_path / name / "metrics.csv")
        assert [row["step"] for row in logged] == ["2", "5"]
        assert logged[0].keys() >= FIELDS
        last = {field: float(logged[-1][field]) for field in FIELDS}
        assert last == pytest.approx({field: metrics[field] for field in FIELDS})
    assert bar == pytest.approx({name: metrics[f"fourmin/{name}"] for name in ("S", "e", "T")})
    assert 0 < summary.e < 1
    assert summary.S * summary.N * summary.e == pytest.approx(summary.T)
    assert 0 < summary.exposed_ms < summary.step_ms
    assert summary.exposed_ms == pytest.approx((1 - summary.e) * summary.step_ms)
    assert summary.e_low <= summary.e_high
    assert 0 < summary.comm_ms < summary.step_ms
    assert summary.bus_mb_per_s > 0
    # 2 samples a batch on 2 ranks.
    assert summary.T * summary.step_ms / 1e3 == pytest.approx(4)
    assert accumulated.T * accumulated.step_ms / 1e3 == pytest.approx(3 * 4)


def other_fits() -> tuple[Any, ...]:
    manual = fit("fourmin_find_unused_parameters_true", TwoOptimizers())
    return manual, fit("ddp"), fit("fourmin", log_every_n_steps=0)


def test_other_ways_to_train(ranks: RankPool) -> None:
    (manual, manual_metrics, _), (ddp, ddp_metrics, bar), (silent, no_metrics, _) = ranks.run(other_fits)[0]
    assert manual_metrics.keys() >= FIELDS
    # Two optimizers count two global steps a batch.
    assert manual.T * manual.step_ms / 1e3 == pytest.approx(4)
    assert ddp_metrics.keys() & FIELDS == WITHOUT_ENGINE
    assert bar.keys() == {"T"}
    assert ddp.S is None
    assert ddp.e is None
    assert not no_metrics.keys() & FIELDS
    assert silent.e > 0


class Validated(Net):
    """Validation that takes as long as many steps."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        time.sleep(0.5)


def test_one_device_waits_for_nobody_and_validation_does_not_count(tmp_path: Path) -> None:
    monitor = ScalingMonitor()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=2, val_check_interval=1, callbacks=[monitor], log_every_n_steps=1,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path, **quiet,
    )  # fmt: skip
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 3, 8, 8), torch.arange(6)), 2)
    trainer.fit(Validated(), loader, DataLoader(loader.dataset, 6))
    assert monitor.summary is not None
    assert (monitor.summary.N, monitor.summary.e, monitor.summary.exposed_ms) == (1, 1.0, 0.0)
    assert pytest.approx(monitor.summary.T) == monitor.summary.S
    assert monitor.summary.step_ms < 500


def test_resumed_in_the_middle_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    (summary, metrics), _ = ranks.run(resumed_fit, tmp_path / "mid.ckpt")
    assert summary is not None
    assert 0 < summary.step_ms < 60_000
    assert 0 < metrics["fourmin/step_ms"] < 60_000


def resumed_fit(path: Path) -> tuple[ScalingSummary | None, dict[str, float]]:
    save = LambdaCallback(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(path))
    rank_trainer("fourmin", max_steps=2, callbacks=[save]).fit(Net(), images(6))
    monitor = ScalingMonitor()
    trainer = rank_trainer("fourmin", max_steps=3, log_every_n_steps=1, callbacks=[monitor])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        trainer.fit(Net(), images(6), ckpt_path=str(path))
    return monitor.summary, {name: float(value) for name, value in trainer.callback_metrics.items()}


class Words(Regression):
    """Makes its samples of words."""

    def training_step(self, batch: list[str], batch_idx: int) -> Tensor:
        return self.net(torch.tensor([float(len(word)) for word in batch])).sum()


def fit_words() -> str:
    trainer = rank_trainer(FourMinStrategy(), max_steps=1, callbacks=[ScalingMonitor()])
    # A rank that is still in its step when another fails learns it from there.
    with pytest.raises((ValueError, LostRankError), match="ScalingMonitor") as raised:
        trainer.fit(Words(nn.Linear(2, 1)), DataLoader(["one", "two", "three", "four"], 2))
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    return str(raised.value)


def test_batch_without_a_tensor_is_refused(ranks: RankPool) -> None:
    own = "ScalingMonitor cannot tell how many samples a batch of type list has:"
    errors = ranks.run(fit_words)
    assert any(error.startswith(own) for error in errors)
    for rank, error in enumerate(errors):
        assert error.startswith((own, f"rank {1 - rank} failed: ValueError: {own}"))


def fit_with_own_hook() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    monitor = ScalingMonitor()
    strategy = FourMinStrategy(ddp_comm_hook=allreduce_hook)
    trainer = rank_trainer(strategy, max_steps=2, callbacks=[monitor])
    trainer.fit(Regression(nn.Linear(4, 4)), data(4))
    return monitor.summary


def test_a_hook_of_the_user_s_own_hides_when_gradients_are_under_way(ranks: RankPool) -> None:
    assert ranks.run(fit_with_own_hook)[0].e is None


class Logs(Regression):
    """Logs a mean over ranks in every step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


class TakeWaits(Callback):
    """Takes the times of each step from a meter of its own."""

    def __init__(self) -> None:
        self.num_waits: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FourMinStrategy)
        meter = trainer.strategy.measure_communication()
        assert meter is not None
        self.meter = meter

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_waits.append(len(self.meter.take().waits))


def waits_of_each_step(trace: bool) -> list[int]:
    takes = TakeWaits()
    trainer = rank_trainer(FourMinStrategy(trace=trace), max_steps=3, callbacks=[takes])
    trainer.fit(Logs(nn.Linear(4, 1)), data(4))
    return takes.num_waits


@pytest.mark.parametrize("trace", [False, True])
def test_logging_a_mean_over_ranks_is_a_wait(
    ranks: RankPool, trace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for num_waits in ranks.run(waits_of_each_step, trace, world=2):
        assert num_waits == [1, 1, 1]
