"""ShardDataModule with a Trainer in one process: epochs, resume, normalisation, demo data."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor

from lightning_fourmin import FourMinPrecision, ShardDataModule
from lightning_fourmin.data.digits import digits_folder
from lightning_fourmin.data.pack.verify import VerifyOptions, verify
from lightning_fourmin.data.transforms import EvalImage
from lightning_fourmin.errors import ShardError
from tests.support.counting import Counting, SaveAt, numbers_module
from tests.support.shards import jpeg, write_numbers, write_shard

TESTS = Path(__file__).parents[1]
NUM_SAMPLES = 23
BATCH_SIZE = 4
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder, [9, 2, 12])
    return str(folder)


def trainer(**kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return Trainer(**defaults | kwargs)


def fit(path: str, ckpt_path: Path | None = None, reads_estimate: bool = False, **kwargs: Any) -> Counting:
    torch.manual_seed(1)
    module = Counting(reads_estimate)
    options = {"num_workers": kwargs.pop("num_workers", 0)}
    trainer(**kwargs).fit(module, numbers_module(path, BATCH_SIZE, **options), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def whole(path: str) -> Counting:
    """Three epochs without a break."""
    return fit(path)


def test_each_epoch_reads_every_sample_at_most_once(whole: Counting) -> None:
    assert [epoch for epoch, _ in whole.seen] == [epoch for epoch in range(3) for _ in range(NUM_BATCHES)]
    lines = []
    for epoch in range(3):
        numbers = [number for e, batch in whole.seen if e == epoch for number in batch]
        assert len(set(numbers)) == len(numbers) == NUM_BATCHES * BATCH_SIZE
        lines.append(tuple(numbers))
    assert len(set(lines)) == 3


@pytest.mark.parametrize("reads_estimate", [False, True])
@pytest.mark.parametrize(
    ("hook", "at"),
    [("batch", 1), ("batch", 7), ("batch", NUM_BATCHES), ("validation", NUM_BATCHES), ("epoch", 2 * NUM_BATCHES)],
)
@pytest.mark.parametrize("limit", [1.0, 2])
def test_a_resumed_run_continues_as_if_never_stopped(
    path: str, tmp_path: Path, hook: str, at: int, reads_estimate: bool, limit: float
) -> None:
    options: dict[str, Any] = {"limit_train_batches": limit, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    if limit == 2:
        at = {1: 1, 7: 3, NUM_BATCHES: 2, 2 * NUM_BATCHES: 4}[at]
    expected = fit(path, callbacks=[SaveAt(tmp_path / "some.ckpt", hook, at)], **options)
    found = fit(path, tmp_path / "some.ckpt", reads_estimate, **options)
    assert found.seen == expected.seen[at:]
    assert torch.equal(found.net.weight, expected.net.weight)


def test_an_epoch_that_max_steps_ended_resumes_where_it_was(path: str, tmp_path: Path, whole: Counting) -> None:
    first = fit(path, max_steps=2, callbacks=[SaveAt(tmp_path / "some.ckpt", "epoch", 2)])
    second = fit(path, tmp_path / "some.ckpt", max_steps=2 * NUM_BATCHES)
    assert [batch for _, batch in first.seen + second.seen[: NUM_BATCHES - 2]] == [
        batch for _, batch in whole.seen[:NUM_BATCHES]
    ]
    after = [number for _, batch in second.seen[NUM_BATCHES - 2 :] for number in batch]
    assert len(set(after)) == len(after) == NUM_BATCHES * BATCH_SIZE


def test_resume_does_not_mind_prefetching(path: str, tmp_path: Path) -> None:
    expected = fit(path, callbacks=[SaveAt(tmp_path / "some.ckpt", "batch", 7)], num_workers=2)
    assert fit(path, tmp_path / "some.ckpt", num_workers=2).seen == expected.seen[7:]


def test_validation_in_the_middle_of_an_epoch_changes_nothing(path: str, whole: Counting) -> None:
    assert fit(path, limit_val_batches=1.0, val_check_interval=2).seen == whole.seen


def test_resumed_from_a_validation_in_the_middle_of_an_epoch(path: str, tmp_path: Path, whole: Counting) -> None:
    options: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": 2}
    fit(path, callbacks=[SaveAt(tmp_path / "some.ckpt", "validation", 2)], **options)
    assert fit(path, tmp_path / "some.ckpt", **options).seen == whole.seen[2:]


def test_reloaded_loaders_continue_alike(path: str, tmp_path: Path, whole: Counting) -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1}
    found = fit(path, callbacks=[SaveAt(tmp_path / "some.ckpt", "batch", 7)], **options)
    assert found.seen == whole.seen
    assert fit(path, tmp_path / "some.ckpt", **options).seen == whole.seen[7:]


def test_two_trainers_may_share_a_data_module(path: str, whole: Counting) -> None:
    data = numbers_module(path, BATCH_SIZE)
    for _ in range(2):
        module, training = Counting(), trainer(limit_val_batches=1.0)
        training.validate(module, data, verbose=False)
        training.fit(module, data)
        assert module.seen == whole.seen


def test_overfitting_sees_the_same_batches_in_every_epoch(path: str) -> None:
    seen = fit(path, overfit_batches=2).seen
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2]
    assert [batch for _, batch in seen] == [[0, 1, 2], [3, 4, 5, 6]] * 3


def test_a_second_fit_begins_the_next_epoch(path: str, whole: Counting) -> None:
    torch.manual_seed(1)
    module, data = Counting(), numbers_module(path, BATCH_SIZE)
    training = trainer(max_epochs=1)
    training.fit(module, data)
    training.fit_loop.max_epochs = 3
    training.fit(module, data)
    assert module.seen == whole.seen


@pytest.mark.parametrize("how", [{"limit_val_batches": 0}, {"check_val_every_n_epoch": 2}, {}])
@pytest.mark.parametrize(
    ("hook", "at"),
    [("epoch", NUM_BATCHES), ("epoch", 2 * NUM_BATCHES), ("batch", 7), ("batch", NUM_BATCHES)],
)
@pytest.mark.parametrize(("max_epochs", "reads_estimate"), [(-1, False), (4, False), (4, True)])
def test_a_run_resumed_with_max_steps_continues_as_if_never_stopped(
    path: str,
    tmp_path: Path,
    whole: Counting,
    how: dict[str, Any],
    hook: str,
    at: int,
    max_epochs: int,
    reads_estimate: bool,
) -> None:
    """There Lightning counts an epoch that it resumes in as done, and resumes in one that is at its end."""
    options = {"max_epochs": max_epochs, "limit_val_batches": 1.0} | how
    saved = tmp_path / "some.ckpt"
    first = fit(path, max_steps=at, callbacks=[SaveAt(saved, hook, at)], **options)
    second = fit(path, saved, reads_estimate, max_steps=3 * NUM_BATCHES, **options)
    assert [batch for _, batch in first.seen + second.seen] == [batch for _, batch in whole.seen]
    if (hook, at) == ("batch", NUM_BATCHES):
        # Saved before the epoch was over: no epoch without batches comes in between.
        assert second.seen == whole.seen[at:]


class Ends(Callback):
    """After which batches an epoch was over, and how many steps there had been."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append((trainer.is_last_batch, trainer.global_step))


@pytest.mark.parametrize("reads_estimate", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "num_accumulated", "ends"),
    [
        (5, 1, [(False, 3), (True, 4)]),
        # The same samples a step, as on half the ranks.
        (2, 2, [(False, 2), (False, 3), (False, 3), (False, 4), (False, 4), (True, 5)]),
        (12, 1, [(True, 3)]),
    ],
)
def test_another_global_batch_in_mid_epoch(
    path: str,
    tmp_path: Path,
    batch_size: int,
    num_accumulated: int,
    ends: list[tuple[bool, int]],
    reads_estimate: bool,
) -> None:
    saved, first = tmp_path / "some.ckpt", Counting()
    trainer(max_steps=2, callbacks=[SaveAt(saved, "batch", 2)]).fit(first, numbers_module(path, BATCH_SIZE))
    module, seen = Counting(reads_estimate), Ends()
    training = trainer(max_epochs=2, accumulate_grad_batches=num_accumulated, callbacks=[seen])
    training.fit(module, numbers_module(path, batch_size), ckpt_path=saved)
    assert seen.seen[: len(ends)] == ends
    before, after = ([number for epoch, batch in one.seen if epoch == 0 for number in batch] for one in (first, module))
    # 20 of 23 samples fill batches of 4; of the 12 that are left no batch of 5 has the last two.
    assert len({*before, *after}) == len(before) + len(after) == 8 + 12 // batch_size * batch_size
    second = [batch for epoch, batch in module.seen if epoch == 1]
    whole_step = batch_size * num_accumulated
    assert sum(map(len, second)) == NUM_SAMPLES // whole_step * whole_step


def test_a_trainer_that_resumes_twice_counts_right_both_times(path: str, tmp_path: Path) -> None:
    """What corrects Lightning's count of batches stays in the Trainer, and must not do so for another checkpoint."""
    for at in (1, 3):
        fit(path, callbacks=[SaveAt(tmp_path / f"{at}.ckpt", "batch", at)], max_epochs=1)
    ends = Ends()
    training = trainer(max_epochs=1, callbacks=[ends])
    num_callbacks = []
    # Of the 20 samples in batches of 4, 16 or 8 are left. The last run has the batches of the checkpoint.
    for at, batch_size, num_batches in ((1, 3, 5), (3, 3, 2), (1, 3, 5), (1, BATCH_SIZE, 4)):
        ends.seen.clear()
        training.fit(Counting(), numbers_module(path, batch_size), ckpt_path=tmp_path / f"{at}.ckpt")
        assert [is_last for is_last, _ in ends.seen] == [False] * (num_batches - 1) + [True]
        num_callbacks.append(len(training.callbacks))
    assert len(set(num_callbacks)) == 1


def test_another_global_batch_that_the_rest_does_not_fill(path: str, tmp_path: Path) -> None:
    for hook, at in (("batch", 2), ("epoch", NUM_BATCHES)):
        fit(path, callbacks=[SaveAt(tmp_path / f"{hook}.ckpt", hook, at)])
    with pytest.raises(
        ShardError, match="the 12 samples that are left of epoch 0 do not fill the global batch of 13: "
    ):
        trainer().fit(Counting(), numbers_module(path, 13), ckpt_path=tmp_path / "batch.ckpt")
    with pytest.raises(ShardError, match="after 2 batches of epoch 0 with global_batch 4, but this run has 5"):
        trainer(limit_train_batches=3).fit(Counting(), numbers_module(path, 5), ckpt_path=tmp_path / "batch.ckpt")
    # A limit above the epoch's length limits nothing.
    trainer(limit_train_batches=99).fit(Counting(), numbers_module(path, 5), ckpt_path=tmp_path / "batch.ckpt")
    module = Counting()
    trainer(max_epochs=2).fit(module, numbers_module(path, 5), ckpt_path=tmp_path / "epoch.ckpt")
    assert [(epoch, len(batch)) for epoch, batch in module.seen] == [(1, 5)] * 4


def test_a_checkpoint_that_was_loaded_to_validate_does_not_move_training(path: str, tmp_path: Path) -> None:
    fit(path, callbacks=[SaveAt(tmp_path / "some.ckpt", "batch", 2)])
    data, module = numbers_module(path, BATCH_SIZE), Counting()
    trainer(limit_val_batches=1.0).validate(module, data, ckpt_path=tmp_path / "some.ckpt", verbose=False)
    trainer(max_epochs=1).fit(module, data)
    assert len(module.seen) == NUM_BATCHES


def run_until(arguments: list[str], num_steps: int | None) -> list[str]:
    """The lines of a script that is killed when it has done some steps."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    lines: list[str] = []
    with subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if num_steps is not None and len(lines) == num_steps:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == (0 if num_steps is None else -signal.SIGKILL)
    return lines


def test_killed_it_reads_every_sample_exactly_once(path: str, tmp_path: Path) -> None:
    arguments = [str(TESTS / "scripts" / "count.py"), path, str(tmp_path / "last.ckpt")]
    lines = run_until(arguments, 15) + run_until(arguments, None)
    assert lines.pop() == "done\n"
    steps: dict[int, tuple[int, list[int]]] = {}
    for line in lines:
        step, epoch, *numbers = map(int, re.findall(r"\d+", line))
        # A step that was killed before its checkpoint was written is done again.
        assert steps.setdefault(step, (epoch, numbers)) == (epoch, numbers)
    assert sorted(steps) == list(range(1, 2 * (NUM_SAMPLES // 2) + 1))
    for epoch in range(2):
        seen = Counter(number for e, numbers in steps.values() if e == epoch for number in numbers)
        assert set(seen.values()) == {1}
        assert len(seen) == NUM_SAMPLES // 2 * 2


def test_it_can_be_pickled_after_a_run(path: str) -> None:
    """As a second run needs that spawns its ranks."""
    data = numbers_module(path, BATCH_SIZE, num_workers=1)
    trainer(max_epochs=1).fit(Counting(), data)
    data.trainer = None
    again = pickle.loads(pickle.dumps(data))
    assert len(list(again.train_dataloader())) == NUM_BATCHES


class Images(LightningModule):
    """Keeps the first batch of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.first: dict[str, list[Tensor]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.first.setdefault("train", batch)
        return (self.scale * batch[0]).pow(2).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.first.setdefault("val", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


PRECISIONS: dict[str, tuple[list[Any], torch.dtype, float]] = {
    "fp32": ([], torch.float32, 1e-5),
    "lightning's bf16": ([HalfPrecision("bf16-true")], torch.bfloat16, 1e-2),
    "fp16": ([FourMinPrecision("fp16")], torch.float16, 1e-3),
    "bf16": ([FourMinPrecision("bf16")], torch.bfloat16, 1e-2),
}


@pytest.mark.parametrize(("plugins", "dtype", "tolerance"), PRECISIONS.values(), ids=PRECISIONS)
def test_images_are_normalised_in_the_compute_dtype(plugins: list[Any], dtype: torch.dtype, tolerance: float) -> None:
    whole_digit = EvalImage(size=8, resize=8)
    data = ShardDataModule(
        "digits",
        100,
        train_transform=whole_digit,
        eval_transform=whole_digit,
        num_workers=0,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.4),
    )
    module = Images()
    trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, plugins=plugins).fit(module, data)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images, found = module.first["val"]
    assert images.dtype == dtype
    # 360 digits in 4 equal batches.
    assert images.shape == (90, 3, 8, 8)
    assert images.is_contiguous()
    assert found.tolist() == labels[1437:1527].tolist()
    channel = torch.tensor(pixels[1437:1527]).view(-1, 1, 8, 8) * (255 / 16)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    expected = (channel.round() / 255 - mean) / std
    torch.testing.assert_close(images.double(), expected, rtol=tolerance, atol=1e-5)
    assert module.first["train"][0].dtype == dtype


def test_digits_are_written_once() -> None:
    folder = digits_folder()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert digits_folder() == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    data = ShardDataModule("digits", 32)
    assert data.num_classes == 10
    assert data.batches_per_epoch == 1437 // 32
    assert not list(folder.parent.glob(".digits-*"))


def test_digits_need_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ShardError, match=r"scikit-learn, which is not installed .*: pip install scikit-learn, or train"
    ):
        digits_folder()
    assert not list((tmp_path / "lightning_fourmin").iterdir())


def test_workers_end_with_the_run(path: str) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    fit(path, num_workers=2, limit_val_batches=1.0)
    deadline = time.monotonic() + 10
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children() - before


def test_outside_a_trainer(path: str) -> None:
    data = numbers_module(path, BATCH_SIZE)
    assert len(list(data.train_dataloader())) == len(data.train_dataloader()) == data.batches_per_epoch == NUM_BATCHES
    assert sorted(n for batch in data.val_dataloader() for n in batch.tolist()) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": "abc"}, "batch_size='abc' must be a whole number"),
        ({"num_workers": None}, "num_workers=None must be a whole number"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"prefetch_factor": 0}, "prefetch_factor=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"remainder": "keep"}, "remainder='keep' must be one of 'drop', 'wrap'"),
        ({"on_error": "ignore"}, "on_error='ignore' must be one of 'raise', 'skip'"),
        ({"mean": (0.13,)}, r"mean=\(0.13,\) must be three shares of 255, for red, green and blue"),
        ({"mean": (124, 116, 104)}, r"mean=\(124, 116, 104\) must be three shares"),
        ({"std": (0.2, 0.2, 0.0)}, r"std=\(0.2, 0.2, 0.0\) must be three shares"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardDataModule("digits", **{"batch_size": 1} | arguments)


def test_splits_that_do_not_fit(path: str) -> None:
    with pytest.raises(ShardError, match=r"has no split 'dev' \(it has train\): choose one of these, or pack it"):
        numbers_module(path, 2, val_split="dev").val_dataloader()
    with pytest.raises(
        ShardError, match=r"split 'train' of .*: the split has 23 samples, less than the global batch of 24"
    ):
        numbers_module(path, 24).train_dataloader()


def sized(folder: Path, *sizes: tuple[int, int]) -> ShardDataModule:
    """A data module of images of these widths and heights."""
    samples = [{"__key__": f"{i:03d}", "jpg": jpeg(*size, seed=i), "cls": 0} for i, size in enumerate(sizes)]
    write_shard(folder / "train-000000.tar", samples)
    verify(VerifyOptions(str(folder), index=True, num_workers=1))
    return ShardDataModule(str(folder), 1, num_workers=0)


@pytest.mark.parametrize(
    ("sizes", "image_size", "augment"),
    [([(28, 28)] * 2, 28, "none"), ([(100, 120), (140, 200)], 120, "crop"), ([(500, 400)], 224, "crop")],
)
def test_the_size_of_images_is_that_of_the_index(
    tmp_path: Path, sizes: list[tuple[int, int]], image_size: int, augment: str
) -> None:
    module = sized(tmp_path, *sizes)
    assert (module.image_size, module.augment) == (image_size, augment)
    (images, _), *_ = module.train_dataloader()
    assert tuple(images.shape) == (1, image_size, image_size, 3)


def test_augmentation_by_name(tmp_path: Path) -> None:
    sized(tmp_path, (28, 20))
    module = ShardDataModule(str(tmp_path), 1, num_workers=0, augment="none", image_size=20)
    first, second = ([images for (images, _) in module.train_dataloader()] for _ in range(2))
    assert torch.equal(first[0], second[0])
    # All of the height, and the middle of the width, as in evaluation; those resize nothing.
    (sample,) = first
    mirrored = {
        bool(torch.equal(images, sample))
        for seed in range(16)
        for (images, _) in ShardDataModule(
            str(tmp_path), 1, num_workers=0, augment="flip", image_size=20, seed=seed
        ).train_dataloader()
        if torch.equal(images, sample) or torch.equal(images, sample.flip(2))
    }
    assert mirrored == {True, False}
    with pytest.raises(ValueError, match="augment='turn' must be one of None, 'none', 'flip', 'crop'"):
        ShardDataModule(str(tmp_path), 1, augment="turn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="augment='flip' is part of the default train_transform"):
        ShardDataModule(str(tmp_path), 1, augment="flip", train_transform=EvalImage())
