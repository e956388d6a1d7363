"""ShardDataModule on real ranks: exactly once, exact evaluation, resume on another number of ranks, errors on all."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_fourmin.callbacks.data_monitor import DataMonitor
from lightning_fourmin.errors import ShardError
from tests.support.counting import Counting, SaveAt, numbers_module
from tests.support.pool import RankPool
from tests.support.shards import write_numbers
from tests.support.training import rank_trainer

# One shard less than ranks, and shards of unequal size.
SHARD_SIZES = (17, 1, 12)
NUM_SAMPLES = sum(SHARD_SIZES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder, SHARD_SIZES)
    return str(folder)


def train(
    strategy: str,
    path: str,
    batch_size: int,
    ckpt_path: str | None = None,
    save_path: str | None = None,
    max_steps: int = -1,
    **kwargs: Any,
) -> list[tuple[int, list[int]]]:
    """What this rank saw in two epochs, or up to a step after which it saves."""
    torch.manual_seed(1)
    module = Counting()
    callbacks = [] if save_path is None else [SaveAt(Path(save_path), "batch", max_steps)]
    trainer = rank_trainer(strategy, max_epochs=2, max_steps=max_steps, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(module, numbers_module(path, batch_size, **kwargs), ckpt_path=ckpt_path)
    return module.seen


def numbers(answers: list[list[tuple[int, list[int]]]], epoch: int) -> list[int]:
    return [number for seen in answers for e, batch in seen if e == epoch for number in batch]


@pytest.mark.parametrize("strategy", ["fourmin", "ddp"])
def test_ranks_read_every_sample_once(ranks: RankPool, path: str, strategy: str) -> None:
    answers = ranks.run(train, strategy, path, 2, num_workers=1, nodes=[2, 2])
    assert {len(seen) for seen in answers} == {2 * (NUM_SAMPLES // 8)}
    for epoch in range(2):
        assert len(set(numbers(answers, epoch))) == len(numbers(answers, epoch)) == NUM_SAMPLES // 8 * 8


def test_resume_on_the_same_and_on_another_number_of_ranks(ranks: RankPool, path: str, tmp_path: Path) -> None:
    whole = ranks.run(train, "fourmin", path, 3, world=2)
    first = ranks.run(train, "fourmin", path, 3, save_path=str(tmp_path / "2.ckpt"), max_steps=2, world=2)
    assert [seen[:2] for seen in whole] == first
    same = ranks.run(train, "fourmin", path, 3, ckpt_path=str(tmp_path / "2.ckpt"), world=2)
    assert [seen[2:] for seen in whole] == same
    second = ranks.run(
        train, "fourmin", path, 2, str(tmp_path / "2.ckpt"), str(tmp_path / "3.ckpt"), max_steps=3, world=3
    )
    third = ranks.run(train, "fourmin", path, 6, ckpt_path=str(tmp_path / "3.ckpt"), world=1)
    seen = numbers([*first, *second, *third], epoch=0)
    assert Counter(seen) == Counter(numbers(whole, epoch=0))
    assert sorted(numbers(third, epoch=1)) == sorted(numbers(whole, epoch=1))


def evaluate(strategy: str, path: str, batch_size: int, on_error: str = "raise") -> tuple[float, float]:
    """Accuracy by torchmetrics, and as Lightning averages logged values."""
    trainer = rank_trainer(strategy)
    (metrics,) = trainer.validate(Counting(), numbers_module(path, batch_size, on_error=on_error), verbose=False)
    return metrics["top1"], metrics["mean_epoch"]


@pytest.mark.parametrize("strategy", ["fourmin", "ddp"])
@pytest.mark.parametrize("batch_size", [2, 4, 7])
def test_evaluation_on_ranks_is_exact(ranks: RankPool, path: str, strategy: str, batch_size: int) -> None:
    (alone,) = ranks.run(evaluate, strategy, path, batch_size, world=1)
    assert alone == pytest.approx((10 / 30, 10 / 30))
    for top1, mean in ranks.run(evaluate, strategy, path, batch_size, nodes=[3, 1]):
        assert top1 == alone[0]
        # With ddp it is not: there Lightning rounds the mean number of samples a rank, 7.5 here.
        if strategy == "fourmin":
            assert mean == pytest.approx(alone[1])


def test_evaluation_leaves_damaged_samples_out(ranks: RankPool, tmp_path: Path) -> None:
    write_numbers(tmp_path, SHARD_SIZES, damaged=(0, 7, 8, 29))
    # Of the multiples of 3 only 0 is damaged.
    for answer in ranks.run(evaluate, "fourmin", str(tmp_path), 4, on_error="skip", nodes=[3, 1]):
        assert answer == pytest.approx((9 / 26, 9 / 26))


def test_training_on_damaged_samples_stays_even(ranks: RankPool, tmp_path: Path) -> None:
    write_numbers(tmp_path, SHARD_SIZES, damaged=(0, 7, 8, 29))
    answers = ranks.run(train, "fourmin", str(tmp_path), 5, on_error="skip", world=2)
    assert [[len(batch) for _, batch in seen] for seen in answers] == [[5] * 6] * 2
    assert set(numbers(answers, epoch=0)) == set(range(NUM_SAMPLES)) - {0, 7, 8, 29}


def skipped_in_training(path: str, folder: str) -> list[float]:
    logger = CSVLogger(folder)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 3, "callbacks": [DataMonitor()]}
    trainer = rank_trainer("fourmin", max_epochs=1, limit_val_batches=0, **options)
    trainer.fit(Counting(), numbers_module(path, 5, on_error="skip"))
    if trainer.global_rank:
        return []
    logger.save()
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return [float(row["data_skipped"]) for row in csv.DictReader(file) if row["data_skipped"]]


def test_skipped_samples_of_all_ranks_are_logged(ranks: RankPool, tmp_path: Path) -> None:
    write_numbers(tmp_path, SHARD_SIZES, damaged=(0, 7, 8, 29))
    first, _ = ranks.run(skipped_in_training, str(tmp_path), str(tmp_path / "logs"), world=2)
    assert first == [4.0]


def evaluate_error(path: str) -> str:
    with pytest.raises(ShardError) as caught:
        evaluate("fourmin", path, 2)
    return str(caught.value)


def train_on_a_loader_of_ones_own(path: str) -> str:
    data = numbers_module(path, batch_size=2)
    with pytest.raises(ShardError) as caught:
        rank_trainer("fourmin", max_epochs=1, limit_val_batches=0).fit(
            Counting(), data.train_dataloader(), data.val_dataloader()
        )
    return str(caught.value)


def test_a_loader_that_was_made_outside_of_the_trainer_is_refused(ranks: RankPool, path: str) -> None:
    for answer in ranks.run(train_on_a_loader_of_ones_own, path, world=2):
        assert "made outside of the Trainer, for one rank" in answer
        assert "give the data module itself to the Trainer" in answer


def test_fewer_samples_than_ranks_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    write_numbers(tmp_path, [1, 1])
    answers = ranks.run(evaluate_error, str(tmp_path), world=3)
    assert {answer.split(": ", 1)[1] for answer in answers} == {
        "the split has 2 samples for 3 ranks, so some would have nothing to evaluate: evaluate with fewer ranks"
    }


def test_more_and_fewer_ranks_with_the_same_batch_a_rank(ranks: RankPool, path: str, tmp_path: Path) -> None:
    two, three = str(tmp_path / "2.ckpt"), str(tmp_path / "3.ckpt")
    first = ranks.run(train, "fourmin", path, 3, save_path=two, max_steps=2, world=2)
    second = ranks.run(train, "fourmin", path, 3, two, three, max_steps=3, world=3)
    third = ranks.run(train, "fourmin", path, 3, ckpt_path=three, world=1)
    assert sorted(numbers([*first, *second, *third], epoch=0)) == list(range(NUM_SAMPLES))
    assert sorted(numbers(third, epoch=1)) == list(range(NUM_SAMPLES))


def resume_error(path: str, ckpt_path: str) -> str:
    with pytest.raises(ShardError) as caught:
        train("fourmin", path, 7, ckpt_path=ckpt_path)
    return str(caught.value)


def test_a_rest_that_fills_no_batch_is_refused_on_all_ranks(ranks: RankPool, path: str, tmp_path: Path) -> None:
    ckpt_path = str(tmp_path / "2.ckpt")
    ranks.run(train, "fourmin", path, 3, save_path=ckpt_path, max_steps=2, world=2)
    answers = ranks.run(resume_error, path, ckpt_path, world=3)
    assert len(answers) == 3
    assert all("the 18 samples that are left of epoch 0 do not fill the global batch of 21" in a for a in answers)
