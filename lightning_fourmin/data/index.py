"""The index of a folder of shards, `index.json`: its splits, the size and checksum of each shard, and the classes."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Any

from lightning_fourmin.data.urls import is_url, joined_location, open_source, refuse_pipes
from lightning_fourmin.errors import ShardError
from lightning_fourmin.files import write_whole

INDEX_NAME = "index.json"
FORMAT = 1
"""The version of the file format."""
MAX_BLOCKS = 1 << 40
"""The limit of the number of tar blocks in a shard. With it, sums over shards stay within 64 bits."""


@dataclass(frozen=True)
class Shard:
    """One tar file."""

    name: str
    """Path relative to the index, or a URL."""
    num_samples: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class ImageSizes:
    """The smallest, mean and largest width and height of images, in pixels; each pair is (width, height)."""

    num_images: int
    smallest: tuple[int, int]
    mean: tuple[float, float]
    largest: tuple[int, int]

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]]) -> "ImageSizes | None":
        """The summary of the sizes of images; None if there are none."""
        return cls.merged([cls(1, size, size, size) for size in sizes])

    @classmethod
    def merged(cls, parts: Iterable["ImageSizes | None"]) -> "ImageSizes | None":
        """The summary of all images of several summaries; None if there are none."""
        there = [part for part in parts if part is not None]
        if not there:
            return None
        num_images = sum(part.num_images for part in there)
        smallest = [min(part.smallest[axis] for part in there) for axis in (0, 1)]
        mean = [sum(part.num_images * part.mean[axis] for part in there) / num_images for axis in (0, 1)]
        largest = [max(part.largest[axis] for part in there) for axis in (0, 1)]
        return cls(num_images, (smallest[0], smallest[1]), (mean[0], mean[1]), (largest[0], largest[1]))


@dataclass(frozen=True)
class Split:
    """Shards that belong together, such as train or val."""

    shards: tuple[Shard, ...]
    image_sizes: ImageSizes | None
    """None if the samples have no images."""

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """A text that is another one if any sample or the order of the shards changes. Checkpoints keep it."""
        content = [(shard.num_samples, shard.sha256) for shard in self.shards]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Index:
    """All splits of a folder, and the classes they share."""

    classes: tuple[str, ...]
    """The name of each label; empty if the samples have no labels."""
    splits: dict[str, Split]

    def split(self, name: str, path: str) -> Split:
        """The split of a name; `path` says in the error which index has none."""
        if name not in self.splits:
            known = ", ".join(sorted(self.splits)) or "none"
            raise ShardError(f"{path} has no split {name!r} (it has {known}): choose one of these, or pack it")
        return self.splits[name]

    def write(self, folder: Path) -> None:
        """Writes the index, which appears complete or not at all."""
        splits = {
            name: {"num_samples": split.num_samples, "num_bytes": split.num_bytes, **asdict(split)}
            for name, split in sorted(self.splits.items())
        }
        content = {"format": FORMAT, "classes": self.classes, "splits": splits}
        write_whole(folder / INDEX_NAME, json.dumps(content, indent=1) + "\n")


def read_index(path: str, *, pipes: bool = False) -> Index:
    """Reads the index in a folder or under a URL. With `pipes` its shards may be `pipe:` URLs, which run commands.

    Raises `ShardError` if there is no index, if it is damaged, or if it has such URLs without `pipes`.
    """
    location = joined_location(path, INDEX_NAME)
    if not pipes:
        refuse_pipes([location])
    if not is_url(path) and not Path(location).is_file():
        raise ShardError(
            f"{location} does not exist: pack the shards with `fourmin pack`, or make the index of existing ones with "
            f"`fourmin verify path={path} index=true`"
        )
    try:
        with open_source(location) as file:
            content = json.loads(file.read())
        if content["format"] != FORMAT:
            raise ShardError(f"{location} has format {content['format']}, but this version reads format {FORMAT}")
        index = Index(
            classes=tuple(str(name) for name in content["classes"]),
            splits={name: _parse_split(split) for name, split in content["splits"].items()},
        )
    except OSError as error:
        raise ShardError(f"{location} cannot be read: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ShardError(
            f"{location} is not an index of shards ({type(error).__name__}: {error}): make a new one with "
            f"`fourmin verify path={path} index=true`"
        ) from error
    if not pipes:
        refuse_pipes(shard.name for split in index.splits.values() for shard in split.shards)
    return index


def _parse_split(content: dict[str, Any]) -> Split:
    return Split(tuple(_parse_shard(shard) for shard in content["shards"]), parse_sizes(content["image_sizes"]))


def _parse_shard(content: dict[str, Any]) -> Shard:
    shard = Shard(**content)
    for value, kind in ((shard.name, str), (shard.num_samples, int), (shard.num_bytes, int), (shard.sha256, str)):
        if type(value) is not kind:
            raise TypeError(f"{value!r} is not {kind.__name__}")
    # A sample has at least the header of one file, which is a block.
    if not 0 <= shard.num_samples <= shard.num_bytes // BLOCKSIZE < MAX_BLOCKS:
        raise ValueError(f"{shard.name} cannot have {shard.num_samples} samples in {shard.num_bytes} bytes")
    return shard


def parse_sizes(content: dict[str, Any] | None) -> ImageSizes | None:
    """The image sizes in an index or a journal of `fourmin pack`, as JSON has them."""
    if content is None:
        return None
    lists = {name: tuple(size) for name, size in content.items() if name != "num_images"}
    return ImageSizes(num_images=content["num_images"], **lists)
