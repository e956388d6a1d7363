"""Damaged data while loading: the error names shard, member and offset, or the sample is skipped."""

import gc
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import default_collate

from lightning_fourmin.data.dataset import ShardDataset
from lightning_fourmin.data.index import Index, Split, read_index
from lightning_fourmin.data.loader import EvalLoader, TrainLoader
from lightning_fourmin.data.partition import Partition
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.data.transforms import EvalImage
from lightning_fourmin.errors import ShardError
from tests.support.shards import jpeg, number_of, write_numbers, write_shard

IMAGE = EvalImage(size=8, resize=8, num_classes=5)
ONE_RANK = Partition(1, 3, 1)


def write_images(folder: Path, *special: dict[str, Any]) -> None:
    """A shard of four good samples with others between the second and the third, and a good shard."""
    good = [{"__key__": f"good{number}", "jpg": jpeg(10, 10, number), "cls": number} for number in range(4)]
    shards = [
        write_shard(folder / "train-0.tar", [*good[:2], *special, *good[2:]]),
        write_shard(folder / "train-1.tar", [{**sample, "__key__": f"late{n}"} for n, sample in enumerate(good)]),
    ]
    Index((), {"train": Split(tuple(shards), None)}).write(folder)


def loader(
    folder: Path,
    transform: Any = IMAGE,
    num_workers: int = 0,
    partition: Partition = ONE_RANK,
    rank: int = 0,
    **kwargs: Any,
) -> EvalLoader:
    split = read_index(str(folder)).splits["train"]
    options = {"seed": 0, "window": 0, "collate": default_collate, "on_error": "raise"} | kwargs
    data = ShardDataset(split, str(folder), transform=transform, **options)
    return EvalLoader(data, partition, rank, num_workers=num_workers, prefetch_factor=2, pin_memory=False)


@pytest.fixture
def ends_workers() -> Iterator[None]:
    """An error that a loader raised keeps it, and so its workers, until the garbage is collected.

    Workers hold copies of the pipe by which the pool of ranks ends its fork server, which would wait for them.
    """
    yield
    gc.collect()


def labels(found: Any) -> list[list[int]]:
    """Labels of each batch."""
    return [batch.tolist() for _, batch in found]


BAD = {
    "bad image": (
        {"__key__": "bad", "jpg": b"\xff\xd8nonsense", "cls": 1},
        r"train-0.tar: member bad.jpg at offset \d+ is not a readable image",
    ),
    "missing label": (
        {"__key__": "bad", "jpg": jpeg(9, 9)},
        r"train-0.tar: sample bad at offset \d+ has no field cls \(it has jpg\)",
    ),
    "missing image": (
        {"__key__": "bad", "cls": 1},
        r"train-0.tar: sample bad at offset \d+ has no field jpg \(it has cls\)",
    ),
    "unknown class": (
        {"__key__": "bad", "jpg": jpeg(9, 9), "cls": 5},
        r"train-0.tar: member bad.cls at offset \d+ has class 5, but the index has classes 0 to 4",
    ),
    "label that is no number": (
        {"__key__": "bad", "jpg": jpeg(9, 9), "cls": "cat"},
        r"train-0.tar: member bad.cls at offset \d+ is not an integer: invalid literal",
    ),
    "name that terminals obey": (
        {"__key__": "\x1b[31m\x80\nbad", "jpg": jpeg(9, 9)},
        r"train-0.tar: sample \\x1b\[31m\\x80\\nbad at offset \d+ has no field cls",
    ),
}


@pytest.mark.parametrize(("sample", "message"), BAD.values(), ids=BAD)
def test_bad_samples(tmp_path: Path, sample: dict[str, Any], message: str) -> None:
    write_images(tmp_path, sample)
    with pytest.raises(ShardError, match=f"^{message}"):
        list(loader(tmp_path))


@pytest.mark.usefixtures("ends_workers")
def test_errors_of_workers_arrive_as_they_are(tmp_path: Path) -> None:
    sample, message = BAD["bad image"]
    write_images(tmp_path, sample)
    with pytest.raises(ShardError, match=f"^{message}"):
        list(loader(tmp_path, num_workers=1))


SKIPPED = {"omit": [[0, 1], [2, 3, 0], [1, 2, 3]], "repeat": [[0, 1, 0], [2, 3, 0], [1, 2, 3]]}


@pytest.mark.parametrize("on_error", SKIPPED)
@pytest.mark.parametrize(("sample", "message"), BAD.values(), ids=BAD)
def test_bad_samples_skipped(
    tmp_path: Path, sample: dict[str, Any], message: str, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path, sample)
    found = loader(tmp_path, on_error=on_error)
    with caplog.at_level(logging.WARNING):
        assert labels(found) == SKIPPED[on_error]
    assert found.num_skipped == 1
    (record,) = caplog.records
    assert "rank 0 skipped a sample (1 so far): train-0.tar: " in record.getMessage()


def test_a_batch_without_any_good_sample(tmp_path: Path) -> None:
    bad = [{"__key__": f"bad{number}", "cls": 1} for number in range(4)]
    write_images(tmp_path, *bad)
    # 12 samples: two good, three bad, one bad with two good, three good.
    evaluated = loader(tmp_path, on_error="omit")
    assert labels(evaluated) == [[0, 1], [2, 3, 0], [1, 2, 3]]
    assert evaluated.num_skipped == 4
    # In training those that follow stand in.
    assert labels(loader(tmp_path, on_error="repeat")) == [[0, 1, 0], [2, 3, 0], [2, 3, 0], [1, 2, 3]]
    shard = write_shard(tmp_path / "train-0.tar", bad)
    Index((), {"train": Split((shard,), None)}).write(tmp_path)
    message = r"sample bad0 at offset \d+ has no field jpg .*\(and no other sample of the split is good\)"
    with pytest.raises(ShardError, match=message):
        labels(loader(tmp_path, on_error="repeat"))


def test_a_rank_with_nothing_good_to_evaluate_says_so(tmp_path: Path) -> None:
    """The others would wait for its metrics."""
    write_images(tmp_path)
    (tmp_path / "train-1.tar").unlink()
    first, second = (loader(tmp_path, partition=Partition(2, 3, 1), rank=rank, on_error="omit") for rank in range(2))
    assert labels(first) == [[0, 1], [2, 3]]
    message = r"train-1.tar cannot be opened: .*\(and no other sample that rank 1 evaluates is good\)"
    with pytest.raises(ShardError, match=message):
        labels(second)


def truncate(folder: Path) -> None:
    path = folder / "train-0.tar"
    path.write_bytes(path.read_bytes()[:3000])


def exchange(folder: Path) -> None:
    """The shard of other data under the same name, as long as ours."""
    path = folder / "train-0.tar"
    length = len(path.read_bytes())
    write_shard(path, [{"__key__": f"good{number}", "jpg": jpeg(10, 10), "cls": 0} for number in range(2)])
    path.write_bytes(path.read_bytes().ljust(length, b"\0"))


SHARD_DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "train-0.tar has 3000 bytes, but the index says 20480: the shard is truncated"),
    "missing": (lambda folder: (folder / "train-0.tar").unlink(), "train-0.tar cannot be opened: .*No such file"),
    "another": (
        exchange,
        r"train-0.tar ends after 2 samples, at offset \d+, but the index has more: the shard is damaged or the index "
        "is not its own; check with `fourmin verify`",
    ),
}


@pytest.mark.parametrize(("damage", "message"), SHARD_DAMAGE.values(), ids=SHARD_DAMAGE)
def test_damaged_shards(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_images(tmp_path)
    assert labels(loader(tmp_path)) == [[0, 1], [2, 3, 0], [1, 2, 3]]
    damage(tmp_path)
    with pytest.raises(ShardError, match=message):
        list(loader(tmp_path))


def test_a_shard_that_ends_early_is_skipped_to_its_end(tmp_path: Path) -> None:
    write_images(tmp_path)
    exchange(tmp_path)
    found = loader(tmp_path, on_error="omit")
    assert labels(found) == [[0, 0], [0], [1, 2, 3]]
    assert found.num_skipped == 2


def test_the_same_field_twice(tmp_path: Path) -> None:
    write_images(tmp_path, {"__key__": "bad", "jpg": jpeg(9, 9), "JPG": jpeg(9, 9), "cls": 1})
    with pytest.raises(ShardError, match=r"train-0.tar: member bad.jpg at offset \d+ is there twice"):
        list(loader(tmp_path))
    assert labels(loader(tmp_path, on_error="omit")) == SKIPPED["omit"]


def test_an_empty_shard_is_passed_over(tmp_path: Path) -> None:
    write_numbers(tmp_path, [0, 2, 0, 3, 0])
    numbers = [number for batch in loader(tmp_path, transform=number_of) for number in batch.tolist()]
    assert numbers == [0, 1, 2, 3, 4]


def fails(sample: Sample, rng: np.random.Generator) -> int:
    if sample.number == 2:
        raise ZeroDivisionError("one over zero")
    return sample.number


@pytest.mark.usefixtures("ends_workers")
def test_errors_of_the_transform_say_where(tmp_path: Path) -> None:
    write_numbers(tmp_path, [6])
    with pytest.raises(ZeroDivisionError, match="one over zero") as caught:
        list(loader(tmp_path, transform=fails))
    assert caught.value.__notes__ == ["in the transform of sample 000002 of train-000000.tar"]
    found = loader(tmp_path, transform=fails, on_error="omit")
    assert [batch.tolist() for batch in found] == [[0, 1], [3, 4, 5]]
    with pytest.raises(ZeroDivisionError, match=r"in the transform of sample 000002 of train-000000.tar"):
        list(loader(tmp_path, transform=fails, num_workers=1))


def test_counts_stay_equal_on_all_ranks(tmp_path: Path) -> None:
    write_images(tmp_path, {"__key__": "bad", "cls": 1}, {"__key__": "worse", "cls": 1})
    split = read_index(str(tmp_path)).splits["train"]
    data = ShardDataset(
        split, str(tmp_path), transform=IMAGE, seed=0, window=3, collate=default_collate, on_error="repeat"
    )
    options = {"num_workers": 0, "prefetch_factor": 2, "pin_memory": False, "remainder": "drop"}
    counts = [[len(batch[1]) for batch in TrainLoader(data, Partition(2, 2, 1), rank, **options)] for rank in range(2)]
    assert counts == [[2, 2], [2, 2]]


def fields(sample: Sample, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "bytes": sample["bin"],
        "json": sample.json()["value"],
        "array": sample.numpy(),
        "text": sample.text(),
        "has_jpg": "jpg" in sample,
    }


def test_fields_that_are_not_images(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{n}", "bin": bytes([n]), "json": {"value": n}, "npy": np.full(2, n), "txt": f"\u00e9{n}"}
        for n in range(3)
    ]
    Index((), {"train": Split((write_shard(tmp_path / "train-0.tar", samples),), None)}).write(tmp_path)
    (batch,) = list(loader(tmp_path, transform=fields, num_workers=1))
    assert batch["bytes"] == [b"\0", b"\1", b"\2"]
    assert batch["json"].tolist() == [0, 1, 2]
    assert batch["array"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["text"] == ["\u00e90", "\u00e91", "\u00e92"]
    assert not batch["has_jpg"].any()


def pickled_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"json": b"{"}, "member a.json at offset 1024 is not JSON"),
        ({"npy": b"\x93NUMPY"}, r"member a.npy at offset \d+ is not a NumPy array"),
        ({"npy": pickled_array()}, r"member a.npy at offset \d+ is not a NumPy array: Object arrays cannot be loaded"),
        ({"txt": b"\xff"}, r"member a.txt at offset \d+ is not UTF-8 text"),
    ],
)
def test_damaged_fields(tmp_path: Path, bad: dict[str, bytes], message: str) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros(2))
    sample = {"__key__": "a", "bin": b"1", "json": b"{}", "npy": array.getvalue(), "txt": b"t"} | bad
    Index((), {"train": Split((write_shard(tmp_path / "train-0.tar", [sample]),), None)}).write(tmp_path)
    with pytest.raises(ShardError, match=f"train-0.tar: {message}"):
        list(loader(tmp_path, transform=fields if "json" in bad else lambda s, rng: (s.numpy(), s.text())))
