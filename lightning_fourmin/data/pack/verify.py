"""Checks every byte of shards, and makes the index of shards that have none.

main process                                       worker processes
reads the index, or finds the shards itself    ->  check_shard: reads a shard once, from end to end
looks for gaps in the numbers of the shards    <-  checksum, sizes and labels of the shard, and its faults
reports the faults; with index=true and no faults, writes the index
"""

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from tarfile import BLOCKSIZE
from typing import IO, cast

from webdataset.shardlists import expand_urls

from lightning_fourmin.data.decode import IMAGE_FIELDS, Encoded
from lightning_fourmin.data.index import INDEX_NAME, ImageSizes, Index, Shard, Split, read_index
from lightning_fourmin.data.pack.process_pool import count_one, run_tasks
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.data.tar import TarCursor
from lightning_fourmin.data.urls import is_url, joined_location, open_source, refuse_pipes
from lightning_fourmin.errors import ShardError
from lightning_fourmin.files import check_writable

# The split and the number in a shard's name: train-000012.tar, imagenet_val_3.tar, 00004.tar.
_NAME = re.compile(r"([^/\s]*?)[-_]?(\d+)\.tar")
PIECE_BYTES = 1 << 20
MAX_CLASSES = 1_000_000
"""The limit of labels in shards without an index, because the index gets a class for each number up to the largest."""


@dataclass(frozen=True)
class VerifyOptions:
    """What to check and how."""

    path: str
    """Folder or URL with an index; without an index also URLs of shards: http://host/train-{000..146}.tar."""
    index: bool = False
    """Whether to make the index of shards that have none."""
    out: Path | None = None
    """Where that index goes. None: the folder itself."""
    decode: bool = False
    """Whether every image is decoded, not only its header read."""
    pipes: bool = False
    """Whether shards may be `pipe:` URLs, which run commands."""
    num_workers: int | None = None
    """The number of worker processes; None: one for each core."""

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise ShardError(f"num_workers={self.num_workers} must be at least 1")


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    index: Index
    """The index that was checked or made."""
    faults: tuple[str, ...]
    """One text for each fault, which names shard, member and offset."""
    num_lacking: dict[str, dict[str, int]]
    """For each split, how many of its samples lack what, such as `{"an image": 3}`."""


@dataclass(frozen=True)
class CheckTask:
    """One shard to check."""

    location: str
    """Path or URL."""
    name: str
    """Its name in the index and in faults."""
    decode: bool
    """Whether every image is decoded, too."""
    num_classes: int
    """Labels must be below it; 0: not known."""
    expected: Shard | None
    """The entry of the shard in the index; None: there is no index yet."""


@dataclass(frozen=True)
class Checked:
    """What a check found in one shard."""

    shard: Shard
    """What its entry in an index should be."""
    sizes: ImageSizes | None
    num_unlabelled: int
    """The number of samples without a label."""
    num_without_image: int
    largest_label: int
    """The largest label; -1 if there is none."""
    faults: tuple[str, ...]


def verify(options: VerifyOptions) -> Report:
    """Checks all shards of an index, or makes the index if there are no faults."""
    if options.index:
        return _make_index(options)
    index = read_index(options.path, pipes=options.pipes)
    tasks = {
        name: [
            CheckTask(joined_location(options.path, shard.name), shard.name, options.decode, len(index.classes), shard)
            for shard in split.shards
        ]
        for name, split in index.splits.items()
    }
    checked, faults = _check(tasks, options.num_workers, sum(split.num_samples for split in index.splits.values()))
    if not is_url(options.path):
        indexed = {shard.name for split in index.splits.values() for shard in split.shards}
        strangers = sorted(path.name for path in Path(options.path).glob("*.tar") if path.name not in indexed)
        faults += [f"{name} is in the folder but not in the index" for name in strangers]
    return Report(index, tuple(faults), _lacking(tasks, checked))


def _make_index(options: VerifyOptions) -> Report:
    out = options.out or Path(options.path)
    if options.out is None and is_url(options.path):
        raise ShardError(f"path={options.path} is a URL: say with out=DIR where its index goes")
    if (out / INDEX_NAME).exists():
        raise ShardError(f"{out / INDEX_NAME} is there already: verify without index=true, or remove it first")
    check_writable(out)
    tasks = {
        split: [CheckTask(joined_location(options.path, name), name, options.decode, 0, None) for name in names]
        for split, names in _find(options).items()
    }
    checked, faults = _check(tasks, options.num_workers, None)
    splits = {
        split: Split(
            tuple(checked[task].shard for task in part), ImageSizes.merged(checked[task].sizes for task in part)
        )
        for split, part in tasks.items()
    }
    # Classes that some samples lack are not those of the split.
    is_labelled = not any(result.num_unlabelled for result in checked.values())
    num_classes = 1 + max(result.largest_label for result in checked.values()) if is_labelled else 0
    index = Index(tuple(str(label) for label in range(num_classes)), splits)
    if not faults:
        index.write(out)
    return Report(index, tuple(faults), _lacking(tasks, checked))


def _lacking(tasks: dict[str, list[CheckTask]], checked: dict[CheckTask, Checked]) -> dict[str, dict[str, int]]:
    return {
        split: {
            "a label (cls)": sum(checked[task].num_unlabelled for task in part),
            "an image": sum(checked[task].num_without_image for task in part),
        }
        for split, part in tasks.items()
    }


def _find(options: VerifyOptions) -> dict[str, list[str]]:
    """The names of the shards of each split, as an index will have them."""
    if is_url(options.path):
        names = expand_urls(options.path)
        if not options.pipes:
            refuse_pipes(names)
    else:
        paths = sorted(Path(options.path).glob("*.tar"))
        # An index that lies elsewhere has to say where the shards are.
        is_here = options.out is None or options.out.resolve() == Path(options.path).resolve()
        names = [path.name if is_here else str(path.absolute()) for path in paths]
    if not names:
        raise ShardError(f"path={options.path} has no files that end in .tar")
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if (match := _NAME.search(name)) is None:
            raise ShardError(f"{name} has no number at its end, as in train-000012.tar: rename it")
        found[match[1] or "train"].append(name)
    return dict(found)


def _gaps(names: list[str]) -> list[str]:
    """A fault for each place where the numbering leaves shards out."""
    numbers = sorted((int(match[2]), name) for name in names if (match := _NAME.search(name)))
    return [
        f"{name} follows number {before}: shards in between are missing"
        for (before, _), (number, name) in pairwise(numbers)
        if number != before + 1
    ]


def _check(
    tasks_of: dict[str, list[CheckTask]], num_workers: int | None, num_samples: int | None
) -> tuple[dict[CheckTask, Checked], list[str]]:
    """Checks the shards of each split: what was found in each shard, and the faults of all, gaps last."""
    tasks = [task for part in tasks_of.values() for task in part]
    checked = dict(run_tasks(check_shard, tasks, num_workers=num_workers, label="samples", num_samples=num_samples))
    faults = [fault for task in tasks for fault in checked[task].faults]
    for part in tasks_of.values():
        faults += _gaps([task.name for task in part])
    return checked, faults


def check_shard(task: CheckTask) -> Checked:
    """Called in a worker: reads the whole shard once and checks checksum, tar structure, keys, labels and images."""
    seen = _Seen(task)
    faults: list[str] = []
    shard = Shard(task.name, 0, 0, "")
    try:
        file = _HashingStream(open_source(task.location))
        # Read as a stream even if it is a local file, so that every byte is read and hashed.
        cursor = TarCursor(cast(IO[bytes], file), task.name, seeks=False)
        for sample in cursor.samples():
            faults += [str(sample)] if isinstance(sample, ShardError) else seen.check(sample)
            count_one()
        while file.read(PIECE_BYTES):
            pass
        file.close()
        shard = Shard(task.name, seen.num_samples, file.num_bytes, file.sha256.hexdigest())
        faults += [f"{task.name}: member {link} is a link, which is no part of a sample" for link in cursor.links]
        faults += [*seen.unpaired(), *_check_end(task.name, cursor.offset, file), *_compare(shard, task.expected)]
    except ShardError as error:
        faults.append(str(error))
    except OSError as error:
        faults.append(f"{task.name} cannot be read: {error}")
    sizes = ImageSizes.of(seen.sizes)
    return Checked(shard, sizes, seen.num_unlabelled, seen.num_without_image, seen.largest_label, tuple(faults))


class _HashingStream:
    """A stream to read, which counts and hashes the bytes that were read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.num_used_bytes = 0
        """The number of bytes up to the last one that is not zero."""

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        if used := len(data.rstrip(b"\0")):
            self.num_used_bytes = self.num_bytes + used
        self.num_bytes += len(data)
        return data

    def close(self) -> None:
        self._file.close()


def _check_end(name: str, offset: int, file: _HashingStream) -> list[str]:
    """The fault of a shard whose last sample, which ends at `offset`, is not followed by zeros and the end."""
    if file.num_used_bytes > offset:
        return [f"{name}: the header at offset {offset} is damaged: what comes after it cannot be read"]
    if file.num_bytes < offset + BLOCKSIZE:
        return [f"{name} is truncated: it has no end mark at offset {offset}"]
    return []


def _compare(shard: Shard, expected: Shard | None) -> list[str]:
    faults = [] if shard.num_samples else [f"{shard.name} is empty: it has no samples"]
    if expected is not None:
        faults += [
            f"{shard.name} has {name} {getattr(shard, name)}, but the index says {getattr(expected, name)}"
            for name in ("num_samples", "num_bytes", "sha256")
            if getattr(shard, name) != getattr(expected, name)
        ]
    return faults


class _Seen:
    """The samples of a shard so far: their keys, fields, labels and image sizes, and the faults that these show."""

    def __init__(self, task: CheckTask) -> None:
        self._task = task
        self._keys: set[str] = set()
        self._places_by_fields: dict[str, list[str]] = defaultdict(list)
        self.num_samples = 0
        self.sizes: list[tuple[int, int]] = []
        self.num_unlabelled = self.num_without_image = 0
        self.largest_label = -1

    def check(self, sample: Sample) -> list[str]:
        """The faults of one sample."""
        faults: list[str] = []
        self.num_samples += 1
        if sample.key in self._keys:
            faults.append(f"{sample.place}: its key was there before, so its files are not side by side")
        self._keys.add(sample.key)
        fields = sorted({"an image" if field in IMAGE_FIELDS else field for field in sample.members})
        self._places_by_fields[", ".join(fields)].append(sample.place)
        self.num_unlabelled += "cls" not in sample
        self.num_without_image += "an image" not in fields
        for field, member in sample.members.items():
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                faults.append(str(sample.fault(field, "has a name that leads out of a folder")))
            if field in IMAGE_FIELDS:
                try:
                    image = Encoded.of(member.data)
                    self.sizes.append((image.width, image.height))
                    if self._task.decode:
                        image.pixels()
                except ValueError as error:
                    faults.append(str(sample.fault(field, f"is not a readable image: {error}")))
        try:
            label = sample.label(self._task.num_classes) if "cls" in sample else -1
            if self._task.expected is None and "cls" in sample and not 0 <= label < MAX_CLASSES:
                raise sample.fault("cls", f"has class {label}, but classes are 0 to {MAX_CLASSES - 1} at most")
            self.largest_label = max(self.largest_label, label)
        except ShardError as error:
            faults.append(str(error))
        return faults

    def unpaired(self) -> list[str]:
        """A fault for each sample whose fields are not those of most others."""
        usual = max(self._places_by_fields.items(), key=lambda item: len(item[1]), default=("", []))[0]
        return [
            f"{place} has {fields}, but most samples of the shard have {usual}"
            for fields, places in self._places_by_fields.items()
            if fields != usual
            for place in places
        ]
