"""Checks one shard: checksum, tar structure, pairing of keys, labels, images."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from tarfile import BLOCKSIZE
from typing import IO, cast

from lightning_fourmin.data.decode import IMAGE_FIELDS, Encoded
from lightning_fourmin.data.index import ImageSizes, Shard
from lightning_fourmin.data.pack.process_pool import count_one
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.data.tar import TarCursor
from lightning_fourmin.data.urls import open_source
from lightning_fourmin.errors import ShardError

PIECE_BYTES = 1 << 20
MAX_CLASSES = 1_000_000
"""Of shards without an index: a larger label is some other number, and would make as many classes."""


@dataclass(frozen=True)
class CheckTask:
    """One shard to check."""

    location: str
    name: str
    decode: bool
    num_classes: int
    """0: not known."""
    expected: Shard | None
    """What the index says, if there is one."""


@dataclass(frozen=True)
class Checked:
    """What was found."""

    shard: Shard
    sizes: ImageSizes | None
    largest_label: int | None
    """None if a sample has none."""
    faults: tuple[str, ...]


class _Watched:
    """A stream that remembers the checksum and the length of what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.num_used_bytes = 0
        """Bytes up to the last that is not zero."""

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        if used := len(data.rstrip(b"\0")):
            self.num_used_bytes = self.num_bytes + used
        self.num_bytes += len(data)
        return data

    def close(self) -> None:
        self._file.close()


def check_shard(task: CheckTask) -> Checked:
    """Reads the whole shard once."""
    seen = _Seen(task)
    faults: list[str] = []
    shard = Shard(task.name, 0, 0, "")
    try:
        file = _Watched(open_source(task.location))
        cursor = TarCursor(cast(IO[bytes], file), task.name, seeks=False)
        for sample in cursor.samples():
            faults += [str(sample)] if isinstance(sample, ShardError) else seen.check(sample)
            count_one()
        while file.read(PIECE_BYTES):
            pass
        file.close()
        shard = Shard(task.name, seen.num_samples, file.num_bytes, file.sha256.hexdigest())
        faults += [*seen.unpaired(), *_check_end(task.name, cursor.offset, file), *_compare(shard, task.expected)]
    except ShardError as error:
        faults.append(str(error))
    except OSError as error:
        faults.append(f"{task.name} cannot be read: {error}")
    return Checked(shard, ImageSizes.of(seen.sizes), seen.largest_label, tuple(faults))


def _check_end(name: str, offset: int, file: _Watched) -> list[str]:
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
    """What the samples of a shard have in common, and those that have not."""

    def __init__(self, task: CheckTask) -> None:
        self._task = task
        self._keys: set[str] = set()
        self._places_by_fields: dict[str, list[str]] = defaultdict(list)
        self.num_samples = 0
        self.sizes: list[tuple[int, int]] = []
        self.largest_label: int | None = -1

    def check(self, sample: Sample) -> list[str]:
        faults: list[str] = []
        self.num_samples += 1
        if sample.key in self._keys:
            faults.append(f"{sample.place}: its key was there before, so its files are not side by side")
        self._keys.add(sample.key)
        fields = sorted({"an image" if field in IMAGE_FIELDS else field for field in sample.members})
        self._places_by_fields[", ".join(fields)].append(sample.place)
        for field, member in sample.members.items():
            if field in IMAGE_FIELDS:
                try:
                    image = Encoded.of(member.data)
                    self.sizes.append((image.width, image.height))
                    if self._task.decode:
                        image.pixels()
                except ValueError as error:
                    faults.append(str(sample.fault(field, f"is not a readable image: {error}")))
        try:
            label = sample.label(self._task.num_classes) if "cls" in sample else None
            if self._task.expected is None and label is not None and not 0 <= label < MAX_CLASSES:
                raise sample.fault("cls", f"has class {label}, but classes are 0 to {MAX_CLASSES - 1} at most")
            if self.largest_label is not None:
                self.largest_label = None if label is None else max(self.largest_label, label)
        except ShardError as error:
            faults.append(str(error))
        return faults

    def unpaired(self) -> list[str]:
        """Samples whose fields are not those of most others."""
        usual = max(self._places_by_fields.items(), key=lambda item: len(item[1]), default=("", []))[0]
        return [
            f"{place} has {fields}, but most samples of the shard have {usual}"
            for fields, places in self._places_by_fields.items()
            if fields != usual
            for place in places
        ]
