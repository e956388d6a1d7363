"""Loaders over real shards: every sample once, one order for any ranks and workers, states that resume anywhere."""

import json
import pickle
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_fourmin.data.dataset import ShardDataset
from lightning_fourmin.data.index import Split
from lightning_fourmin.data.loader import EvalLoader, TrainLoader
from lightning_fourmin.data.order import Span
from lightning_fourmin.data.partition import Partition
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.errors import ShardError
from tests.support.shards import number_of, write_numbers

SHARD_SIZES = (7, 0, 12, 1, 5, 9)
NUM_SAMPLES = sum(SHARD_SIZES)
ONE_RANK = Partition(world=1, batch_size=4, num_workers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numbers")


@pytest.fixture(scope="module")
def split(folder: Path) -> Split:
    return write_numbers(folder, SHARD_SIZES)


def dataset(split: Split, folder: Path, transform: Any = number_of, **kwargs: Any) -> ShardDataset:
    defaults = {"seed": 5, "window": 8, "collate": default_collate, "on_error": "raise"}
    return ShardDataset(split, str(folder), transform=transform, **defaults | kwargs)


def train_loader(
    split: Split, folder: Path, rank: int = 0, partition: Partition = ONE_RANK, processes: bool = False, **kwargs: Any
) -> TrainLoader:
    of_loader = {"remainder": kwargs.pop("remainder", "drop"), "num_accumulated": kwargs.pop("num_accumulated", 1)}
    num_workers = partition.num_workers if processes else 0
    data = dataset(split, folder, **kwargs)
    return TrainLoader(data, partition, rank, num_workers=num_workers, prefetch_factor=2, pin_memory=False, **of_loader)


def take(loader: Any, num_batches: int | None = None) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == num_batches:
            break
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.builds(Partition, world=st.integers(1, 4), batch_size=st.integers(1, 3), num_workers=st.integers(1, 2)),
    st.integers(1, 9),
)
def test_any_ranks_and_workers_read_every_sample_once(
    root: Path, sizes: list[int], partition: Partition, window: int
) -> None:
    path = root / "-".join(map(str, sizes))
    path.mkdir(exist_ok=True)
    split = write_numbers(path, sizes)
    seen: Counter[int] = Counter()
    for rank in range(partition.world):
        loader = train_loader(split, path, rank, partition, remainder="wrap", window=window)
        epoch = take(loader)
        assert len(epoch) == len(loader) == -(-sum(sizes) // partition.global_batch)
        seen.update(number for batch in epoch for number in batch)
    assert set(seen) == set(range(sum(sizes)))
    assert max(seen.values()) - min(seen.values()) <= 1
    if sum(sizes) >= partition.world:
        options = {"num_workers": 0, "prefetch_factor": 2, "pin_memory": False}
        evals = [
            EvalLoader(dataset(split, path, window=0), partition, rank, **options) for rank in range(partition.world)
        ]
        numbers = [number for loader in evals for batch in take(loader) for number in batch]
        assert sorted(numbers) == list(range(sum(sizes)))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_give_what_one_process_gives(split: Split, folder: Path, num_workers: int) -> None:
    partition = Partition(2, 3, num_workers)
    for rank in range(2):
        with_processes = train_loader(split, folder, rank, partition, processes=True)
        without = train_loader(split, folder, rank, partition)
        for _ in range(3):
            assert take(with_processes) == take(without)


def test_the_order_is_the_same_whatever_the_ranks(split: Split, folder: Path) -> None:
    """One rank with one worker reads the epoch's order itself; the ranges of other workers, joined, are it again."""
    order = [number for batch in take(train_loader(split, folder, partition=Partition(1, 1, 1))) for number in batch]
    for partition in (Partition(2, 17, 1), Partition(4, 2, 1), Partition(2, 4, 2)):
        joined: list[int] = []
        for rank in range(partition.world):
            batches = take(train_loader(split, folder, rank, partition))
            joined += [
                n
                for worker in range(partition.num_workers)
                for b in batches[worker :: partition.num_workers]
                for n in b
            ]
        assert joined == order[: len(joined)]
        assert len(joined) == NUM_SAMPLES // partition.global_batch * partition.global_batch


def test_each_epoch_has_a_new_order(split: Split, folder: Path) -> None:
    loader = train_loader(split, folder)
    epochs = [take(loader) for _ in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    loader.set_epoch(2)
    assert take(loader) == epochs[2]


def test_an_epoch_that_is_given_up_is_followed_by_the_next(split: Split, folder: Path) -> None:
    whole = train_loader(split, folder)
    epochs = [take(whole) for _ in range(3)]
    loader = train_loader(split, folder, partition=Partition(1, 4, 1), processes=True)
    assert take(loader, 2) == epochs[0][:2]
    assert take(loader, 3) == epochs[1][:3]
    assert take(loader) == epochs[2]


def test_the_epoch_may_be_set_after_the_iterator_is_made(split: Split, folder: Path) -> None:
    expected = train_loader(split, folder)
    expected.set_epoch(3)
    loader = train_loader(split, folder)
    iterator = iter(loader)
    loader.set_epoch(3)
    assert [batch.tolist() for batch in iterator] == take(expected)


@pytest.mark.parametrize("processes", [False, True])
def test_a_state_continues_with_the_very_batches(split: Split, folder: Path, processes: bool) -> None:
    partition = Partition(2, 2, 2)
    for rank in range(2):
        whole = train_loader(split, folder, rank, partition)
        expected = take(whole) + take(whole)
        loader = train_loader(split, folder, rank, partition, processes)
        found = take(loader, 3)
        for num_batches in (2, 1, None):
            state = json.loads(json.dumps(loader.state_dict()))
            loader = train_loader(split, folder, rank, partition, processes)
            loader.load_state_dict(state)
            assert len(loader) == 8
            found += take(loader, num_batches)
        assert found == expected[:8]
        assert take(loader) == expected[8:]


@pytest.mark.parametrize("num_batches", [3, None])
def test_a_resumed_loader_counts_epochs_by_itself(split: Split, folder: Path, num_batches: int | None) -> None:
    """Lightning's number of the epoch may be one ahead there."""
    whole = train_loader(split, folder)
    expected = [batch for _ in range(3) for batch in take(whole)]
    first = train_loader(split, folder)
    seen = take(first, num_batches)
    loader = train_loader(split, folder)
    loader.load_state_dict(first.state_dict())
    for epoch in (1, 2, 3):
        loader.set_epoch(epoch)
        seen += take(loader)
    assert seen[: len(expected)] == expected


def test_at_the_end_of_an_epoch_an_iterator_may_be_empty(split: Split, folder: Path) -> None:
    """Lightning may ask for one more batch of a resumed epoch."""
    epochs = train_loader(split, folder)
    state = train_loader(split, folder).state_dict() | {"left": [], "num_batches": 8}
    at_end = [True]
    options = {"num_workers": 0, "prefetch_factor": 2, "pin_memory": False, "remainder": "drop"}
    loader = TrainLoader(dataset(split, folder), ONE_RANK, 0, is_at_end=lambda: at_end[0], **options)
    loader.load_state_dict(state)
    assert take(loader) == []
    at_end[0] = False
    take(epochs)
    assert take(loader) == take(epochs)


def test_a_state_is_the_same_on_every_rank(split: Split, folder: Path) -> None:
    states = []
    for rank in range(4):
        loader = train_loader(split, folder, rank, Partition(4, 2, 2))
        take(loader, 3)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)


def test_a_state_continues_on_other_ranks_and_workers(split: Split, folder: Path) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for partition, num_batches in ((Partition(2, 3, 2), 2), (Partition(3, 2, 1), 1), (Partition(1, 6, 3), None)):
        loaders = [train_loader(split, folder, rank, partition) for rank in range(partition.world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            seen += [number for batch in take(loader, num_batches) for number in batch]
        state = loaders[0].state_dict()
    assert state is not None
    assert state["left"] == []
    order = [number for batch in take(train_loader(split, folder, partition=Partition(1, 1, 1))) for number in batch]
    assert sorted(seen) == sorted(order[: NUM_SAMPLES // 6 * 6])


def test_a_state_from_the_end_of_an_epoch_starts_the_next(split: Split, folder: Path) -> None:
    loader = train_loader(split, folder)
    take(loader)
    state = loader.state_dict()
    # At the end of an epoch anything may change.
    other = train_loader(split, folder, partition=Partition(1, 3, 1), window=4)
    other.load_state_dict(state)
    expected = train_loader(split, folder, partition=Partition(1, 3, 1), window=4)
    expected.set_epoch(1)
    assert take(other) == take(expected)


@pytest.mark.parametrize(
    ("name", "there", "change"),
    [
        ("seed", "5", {"seed": 6}),
        ("window", "8", {"window": 9}),
        ("remainder", "'drop'", {"remainder": "wrap"}),
    ],
)
def test_the_rest_of_an_epoch_needs_the_same_settings(
    split: Split, folder: Path, name: str, there: str, change: dict[str, Any]
) -> None:
    loader = train_loader(split, folder)
    take(loader, 3)
    with pytest.raises(ShardError, match=f"after 3 batches of epoch 0 with {name} {there}, but this run has"):
        train_loader(split, folder, **change).load_state_dict(loader.state_dict())


def test_the_rest_of_an_epoch_needs_the_same_data(split: Split, folder: Path, tmp_path: Path) -> None:
    loader = train_loader(split, folder)
    take(loader, 3)
    other = write_numbers(tmp_path, [NUM_SAMPLES])
    with pytest.raises(ShardError, match=r"with data '\w+', but this run has"):
        train_loader(other, tmp_path).load_state_dict(loader.state_dict())


def test_workers_may_be_spawned(split: Split, folder: Path) -> None:
    data = pickle.loads(pickle.dumps(dataset(split, folder)))
    request = next(ONE_RANK.train((Span(0, 8),), 0).requests(0))
    assert data[request].batch.tolist() == take(train_loader(split, folder), 1)[0]


def draw(sample: Sample, rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor([sample.number, int(rng.integers(1 << 40))])


def test_augmentation_depends_on_seed_epoch_and_sample_only(split: Split, folder: Path) -> None:
    def draws(epoch: int, seed: int, partition: Partition) -> dict[int, int]:
        found = {}
        for rank in range(partition.world):
            loader = train_loader(split, folder, rank, partition, remainder="wrap", transform=draw, seed=seed)
            loader.set_epoch(epoch)
            for batch in loader:
                found.update(batch.tolist())
        return found

    one = draws(1, 5, Partition(1, 4, 1))
    assert draws(1, 5, Partition(3, 2, 2)) == one
    assert len(set(one.values())) == NUM_SAMPLES
    for other in (draws(2, 5, Partition(1, 4, 1)), draws(1, 6, Partition(1, 4, 1))):
        assert not set(other.values()) & set(one.values())


def draw_by_others(sample: Sample, rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


def test_ranks_draw_different_numbers_without_the_generator_too(split: Split, folder: Path) -> None:
    partition = Partition(2, 2, 1)
    drawn = []
    for rank in range(partition.world):
        torch.manual_seed(3)
        (batch,) = islice(train_loader(split, folder, rank, partition, processes=True, transform=draw_by_others), 1)
        drawn.append(batch)
    assert (drawn[0] != drawn[1]).all()


def test_a_missing_shard_is_skipped_the_same_way_on_any_ranks_and_resumed(tmp_path: Path) -> None:
    split = write_numbers(tmp_path, [24, 24, 24])
    (tmp_path / split.shards[1].name).unlink()
    by_ranks = []
    for world in (1, 2, 4):
        partition = Partition(world, 8 // world, 1)
        loaders = [train_loader(split, tmp_path, rank, partition, on_error="repeat", window=4) for rank in range(world)]
        batches = [take(loader) for loader in loaders]
        assert [len(one) for one in batches] == [9] * world
        assert sum(loader.num_skipped for loader in loaders) == 24
        by_ranks.append({number for one in batches for batch in one for number in batch})
        loader = train_loader(split, tmp_path, 0, partition, on_error="repeat", window=4)
        first = take(loader, 4)
        resumed = train_loader(split, tmp_path, 0, partition, on_error="repeat", window=4)
        resumed.load_state_dict(loader.state_dict())
        assert [*first, *take(resumed)] == batches[0]
    assert all(len(numbers) == 48 for numbers in by_ranks)


def test_too_few_samples(split: Split, folder: Path) -> None:
    with pytest.raises(ShardError, match=r"34 samples, less than the global batch of 36 \(3 ranks x 12\)"):
        train_loader(split, folder, partition=Partition(3, 12, 1))
    message = r"the global batch of 36 \(3 ranks x 4 x 3 batches a step\): lower batch_size or accumulation,"
    with pytest.raises(ShardError, match=message):
        train_loader(split, folder, partition=Partition(3, 4, 1), num_accumulated=3)
    with pytest.raises(ShardError, match="34 samples for 35 ranks"):
        EvalLoader(dataset(split, folder), Partition(35, 1, 1), 0, num_workers=0, prefetch_factor=2, pin_memory=False)


def slow(sample: Sample, rng: np.random.Generator) -> int:
    import time

    time.sleep(0.01)
    return sample.number


def test_waiting_is_measured(split: Split, folder: Path) -> None:
    loader = train_loader(split, folder, transform=slow)
    num_batches = len(take(loader))
    assert loader.wait_s >= num_batches * 4 * 0.01
