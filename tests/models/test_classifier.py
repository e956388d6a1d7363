"""`ImageClassifier` in ordinary Lightning projects: exact metrics, planned rates, resume, compile."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_fourmin as fm
from lightning_fourmin.optim.schedule import PolySchedule, StepSchedule
from tests.support.pool import RankPool
from tests.support.ranks import current_case, rank_env

NUM_TRAIN, NUM_VAL, NUM_CLASSES = 24, 13, 7


def images(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num)
    return TensorDataset(
        torch.randn(num, 3, 8, 8, generator=generator), torch.randint(NUM_CLASSES, (num,), generator=generator)
    )


def small_net(num_classes: int = NUM_CLASSES) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, num_classes), nn.BatchNorm1d(num_classes))


def trainer(**kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**defaults | kwargs)


class Rates(Callback):
    """The rate that each step was made with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(
    module: fm.ImageClassifier, ckpt_path: Path | None = None, *, batch_size: int = 4, **kwargs: Any
) -> list[float]:
    rates = Rates()
    training = trainer(callbacks=[rates, *kwargs.pop("callbacks", [])], **kwargs)
    training.fit(module, DataLoader(images(NUM_TRAIN), batch_size), DataLoader(images(NUM_VAL), 5), ckpt_path=ckpt_path)
    return rates.seen


def test_defaults_are_lars_and_mlperfs_schedule() -> None:
    module = fm.ImageClassifier("alexnet_bn_small", NUM_CLASSES, model_options={"image_size": 8})
    rates = fit(module)
    (optimizer,) = [module.trainer.optimizers[0]]
    assert isinstance(optimizer, fm.LARS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [2e-4, 0]
    assert optimizer.param_groups[1]["trust_coefficient"] is None
    assert module.rate_plan is not None
    # Of the 4096 that rate 10 is for, this run has 4; its 12 steps end within the 5 epochs of warm-up.
    assert rates == pytest.approx([10 * 4 / 4096 * step / 30 for step in range(12)])
    assert module.rate_plan.in_words() == [
        "Global batch: 4 a rank x 1 rank = 4.",
        "Peak rate: 10 x 4 / 4,096 = 0.00976562 (linear scaling rule).",
        "Length: 2 epochs x 6 steps = 12 steps.",
        "Rate: 0 to 0.00976562 in 30 steps, but the run ends before that.",
    ]


def test_decay_all_treats_biases_and_norms_as_weights() -> None:
    module = fm.ImageClassifier(small_net(), NUM_CLASSES, weight_decay=0.1, decay_all=True)
    fit(module, max_epochs=1)
    (group,) = module.trainer.optimizers[0].param_groups
    assert (len(group["params"]), group["weight_decay"]) == (4, 0.1)
    assert group["trust_coefficient"] is not None


def classifier(**kwargs: Any) -> fm.ImageClassifier:
    torch.manual_seed(1)
    optimizer = partial(torch.optim.SGD, lr=0.4, momentum=0.9)
    options: dict[str, Any] = {"optimizer": optimizer, "schedule": PolySchedule(warmup_steps=3, base_batch=8)}
    return fm.ImageClassifier(small_net(), NUM_CLASSES, **options | kwargs)


@pytest.mark.parametrize(
    ("kwargs", "num_steps", "per_epoch", "batch"),
    [
        ({}, 12, 6, 4),
        ({"accumulate_grad_batches": 4}, 4, 2, 16),
        ({"limit_train_batches": 5}, 10, 5, 4),
        ({"max_steps": 7}, 7, 6, 4),
        ({"max_epochs": -1, "max_steps": 7}, 7, 6, 4),
        ({"overfit_batches": 2}, 4, 2, 4),
    ],
)
def test_rates_follow_exact_step_counts(kwargs: dict[str, Any], num_steps: int, per_epoch: int, batch: int) -> None:
    module = classifier()
    rates = fit(module, **kwargs)
    plan = PolySchedule(warmup_steps=3).plan(0.4 * batch / 8, None, per_epoch, num_steps)
    assert rates == pytest.approx([plan.lr(step) for step in range(num_steps)])


class SaveAfter(Callback):
    """Saves a checkpoint after some steps."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self._path, self._num_steps = path, num_steps

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._num_steps:
            trainer.save_checkpoint(self._path)


# Torch's loader begins its epoch again; the rates do not mind.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("num_steps", [2, 6, 8])
def test_resumed_rates_continue(tmp_path: Path, num_steps: int) -> None:
    path = tmp_path / "some.ckpt"
    expected = fit(classifier(), callbacks=[SaveAfter(path, num_steps)])
    assert fit(classifier(), path) == expected[num_steps:]
    # The checkpoint holds plain values: torch's safe loader takes it.
    assert torch.load(path, weights_only=True)["lr_schedulers"][0]["last_epoch"] == num_steps


@pytest.mark.parametrize("batch_size", [2, 4, 8])
def test_a_run_resumed_with_another_batch_is_as_far_in_its_decay(tmp_path: Path, batch_size: int) -> None:
    path = tmp_path / "last.ckpt"
    schedule = PolySchedule(warmup_epochs=0.5, end_lr=0.0)
    module = classifier(schedule=schedule)
    fit(module, max_epochs=1)
    module.trainer.save_checkpoint(path)
    whole = fit(classifier(schedule=schedule), batch_size=batch_size)
    assert fit(classifier(schedule=schedule), path, batch_size=batch_size) == whole[len(whole) // 2 :]


def test_a_resumed_run_has_the_options_that_it_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "some.ckpt"
    fit(classifier(), callbacks=[SaveAfter(path, 6)], max_epochs=1)
    module = classifier(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5), weight_decay=0.01)
    with caplog.at_level("INFO"):
        rates = fit(module, path)
    said = "Other options than those of the checkpoint: "
    (changes,) = [r.message.removeprefix(said).rstrip(".").split(", ") for r in caplog.records if said in r.message]
    assert sorted(changes) == ["lr 0.4 -> 0.1", "momentum 0.9 -> 0.5", "weight_decay 0.0002 -> 0.01"]
    plan = PolySchedule(warmup_steps=3).plan(0.1 * 4 / 8, None, 6, 12)
    assert rates == pytest.approx([plan.lr(step) for step in range(6, 12)])
    optimizer = module.trainer.optimizers[0]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0]
    assert all(len(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize(
    ("saved_by", "resumed_with", "missing"),
    [(torch.optim.SGD, fm.LARS, "eps, form, trust_coefficient"), (fm.LARS, torch.optim.SGD, "dampening")],
)
def test_a_checkpoint_of_another_optimizer(tmp_path: Path, saved_by: Any, resumed_with: Any, missing: str) -> None:
    path = tmp_path / "some.ckpt"
    fit(classifier(optimizer=partial(saved_by, lr=0.1)), callbacks=[SaveAfter(path, 6)], max_epochs=1)
    with pytest.raises(ValueError, match=f"of another optimizer, which has no {missing}: resume with the same"):
        fit(classifier(optimizer=partial(resumed_with, lr=0.1)), path)


class OwnDecay(fm.ImageClassifier):
    def configure_optimizers(self) -> Any:
        made: Any = super().configure_optimizers()
        made["optimizer"].param_groups[0]["weight_decay"] = 0.03
        return made


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_what_a_subclass_changes_stays(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    for ckpt_path in (None, path):
        module = OwnDecay(small_net(), NUM_CLASSES)
        fit(module, ckpt_path, callbacks=[SaveAfter(path, 2)])
        assert module.trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.03


def test_a_loss_that_is_not_finite_is_not_left_out() -> None:
    module = classifier()
    pixels, labels = images(NUM_VAL).tensors
    pixels[-1] = math.nan
    training = trainer()
    training.validate(module, DataLoader(TensorDataset(pixels, labels), 5), verbose=False)
    assert math.isnan(training.callback_metrics["val/loss"].item())


def test_a_checkpoint_makes_the_same_net(tmp_path: Path) -> None:
    module = fm.ImageClassifier("alexnet_bn_small", NUM_CLASSES, model_options={"image_size": 8, "bn5": False})
    training = trainer(max_epochs=1)
    training.fit(module, DataLoader(images(NUM_TRAIN), 4), DataLoader(images(NUM_VAL), 5))
    training.save_checkpoint(tmp_path / "some.ckpt")
    found = fm.ImageClassifier.load_from_checkpoint(tmp_path / "some.ckpt", map_location="cpu")
    batch = images(3).tensors[0]
    assert torch.equal(module.eval()(batch), found.eval()(batch))


def expected_metrics(module: fm.ImageClassifier) -> dict[str, float]:
    pixels, labels = images(NUM_VAL).tensors
    with torch.no_grad():
        scores = module.eval()(pixels)
    ranks = (scores > scores.gather(1, labels[:, None])).sum(1)
    return {
        "val/loss": cross_entropy(scores, labels).item(),
        "val/top1": (ranks < 1).float().mean().item(),
        "val/top5": (ranks < 5).float().mean().item(),
    }


def test_metrics_count_every_sample_once() -> None:
    module = classifier(label_smoothing=0.1)
    # 13 images in batches of 5, 5 and 3.
    (found,) = trainer().validate(module, DataLoader(images(NUM_VAL), 5), verbose=False)
    assert found == pytest.approx(expected_metrics(module))
    (tested,) = trainer().test(module, DataLoader(images(NUM_VAL), 5), verbose=False)
    assert tested == {name.replace("val", "test"): value for name, value in found.items()}
    predicted = trainer().predict(module, DataLoader(images(NUM_VAL), 5))
    assert predicted is not None
    assert torch.cat(predicted).shape == (NUM_VAL, NUM_CLASSES)


class Uneven(IterableDataset[Any]):
    """Of 13 samples rank 0 has 2 + 2 and rank 1 has 5 + 4, in as many batches."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        start, sizes = ((0, (2, 2)), (4, (5, 4)))[current_case().rank]
        pixels, labels = images(NUM_VAL).tensors
        for size in sizes:
            yield [pixels[start : start + size], labels[start : start + size]]
            start += size


def validate_uneven() -> tuple[dict[str, float], dict[str, float]]:
    module = classifier()
    training = trainer(devices=2, strategy="fourmin", plugins=[rank_env()])
    (found,) = training.validate(module, DataLoader(Uneven(), batch_size=None), verbose=False)
    return dict(found), expected_metrics(module)


def test_metrics_are_exact_over_uneven_ranks(ranks: RankPool) -> None:
    for found, expected in ranks.run(validate_uneven, world=2):
        assert found == pytest.approx(expected)


def test_fewer_classes_than_five() -> None:
    torch.manual_seed(1)
    module = fm.ImageClassifier(small_net(3), 3)
    pixels, labels = images(NUM_VAL).tensors
    loader = DataLoader(TensorDataset(pixels, labels % 3), 5)
    (found,) = trainer().validate(module, loader, verbose=False)
    assert found["val/top5"] == 1
    assert found["val/top1"] < 1


def test_label_smoothing_is_for_training_only() -> None:
    losses = []
    for smoothing in (0.0, 0.5):
        module = classifier(label_smoothing=smoothing, optimizer=partial(torch.optim.SGD, lr=1e-9))
        training = trainer(max_epochs=1, limit_train_batches=1)
        training.fit(module, DataLoader(images(NUM_TRAIN), NUM_TRAIN), DataLoader(images(NUM_TRAIN), NUM_TRAIN))
        metrics = training.callback_metrics
        losses.append((metrics["train/loss"].item(), metrics["val/loss"].item()))
    (plain, plain_val), (smoothed, smoothed_val) = losses
    assert plain_val == smoothed_val
    pixels, labels = images(NUM_TRAIN).tensors
    scores = classifier().train()(pixels)
    assert smoothed == pytest.approx(cross_entropy(scores, labels, label_smoothing=0.5).item())
    assert plain == pytest.approx(cross_entropy(scores, labels).item())


def test_channels_last_gives_the_same() -> None:
    weights = []
    for channels_last in (False, True):
        torch.manual_seed(1)
        module = fm.ImageClassifier("resnet_small", NUM_CLASSES, channels_last=channels_last)
        fit(module, max_epochs=1, limit_train_batches=2)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        assert module.get_parameter("net.stem.0.weight").is_contiguous(memory_format=memory_format)
        weights.append(nn.utils.parameters_to_vector([p.contiguous() for p in module.parameters()]).detach())
    torch.testing.assert_close(weights[1], weights[0])


# Torch's compiler uses torch's deprecated functions.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_only_the_net_is_compiled() -> None:
    module = classifier(compile=True)
    names = list(module.state_dict())
    module.setup("fit")
    assert module._compiled_call_impl is None
    assert module.net._compiled_call_impl is not None
    # Checkpoints of compiled and plain nets are the same.
    assert list(module.state_dict()) == names


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            pixels, labels = images(4).tensors
            yield [pixels, labels]


def test_loaders_without_a_length() -> None:
    loader = DataLoader(Endless(), batch_size=None)
    module = classifier(schedule=StepSchedule(epochs=()))
    training = trainer(max_epochs=-1, max_steps=3, limit_val_batches=0)
    training.fit(module, loader, loader)
    assert module.rate_plan is not None
    assert module.rate_plan.steps_per_epoch == math.inf
    assert module.rate_plan.in_words()[:2] == ["Peak rate: 0.4, as given.", "Length: 3 steps."]
    with pytest.raises(ValueError, match="needs to know how many steps the run has: give the Trainer max_steps"):
        trainer(limit_val_batches=0).fit(classifier(schedule=StepSchedule()), loader, loader)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": "alexnet"}, "model='alexnet' is not known: did you mean 'alexnet_bn'"),
        ({"num_classes": 1}, "num_classes=1 must be at least 2"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1"),
        ({"model": nn.Linear(1, 2), "model_options": {"a": 1}}, "model_options are for nets by name, but model is a"),
    ],
)
def test_arguments_that_make_no_sense(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fm.ImageClassifier(**{"model": "alexnet_bn_small"} | kwargs)
