"""Packs a folder of images, one folder a class, into shards with an index."""

import io
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lightning_fourmin.data.decode import IMAGE_FIELDS, Encoded
from lightning_fourmin.data.index import INDEX_NAME, ImageSizes, Index, Split, read_index
from lightning_fourmin.data.order import permutation
from lightning_fourmin.data.pack.process_pool import count_one, run_tasks
from lightning_fourmin.data.pack.progress import Journal, Written
from lightning_fourmin.data.pack.write_shard import write_shard
from lightning_fourmin.errors import ShardError

log = logging.getLogger(__name__)

NUM_FAULTS_SHOWN = 10
JPEG_QUALITY = 95


@dataclass(frozen=True)
class PackOptions:
    """What to pack and how."""

    src: Path
    """Folder with one folder a class."""
    out: Path
    split: str = "train"
    shard_mb: float = 128.0
    """Source images of a shard, in 10^6 bytes."""
    shard_count: int | None = None
    """Number of shards, instead of shard_mb."""
    seed: int = 0
    """Of the order of the samples."""
    resize: int | None = None
    """Pixels of the short side of images that are larger; they become JPEG."""
    quality: int | None = None
    """Of JPEG, 1 to 100; given alone, all images become JPEG of that quality. None: 95 where images are resized."""
    num_workers: int | None = None
    """Processes; None: one a core."""

    def __post_init__(self) -> None:
        if not self.src.is_dir():
            raise ShardError(f"src={self.src} is not a folder")
        if self.src.resolve() in self.out.resolve().parents:
            raise ShardError(f"out={self.out} lies in src={self.src}, where folders are classes: choose another out")
        if not self.split or "/" in self.split or "." in self.split:
            raise ShardError(f"split={self.split!r} is part of file names: it may not be empty nor have / or . in it")
        for name, value, low, high in (
            ("shard_mb", self.shard_mb, 1e-6, None),
            ("shard_count", self.shard_count, 1, None),
            ("seed", self.seed, 0, None),
            ("resize", self.resize, 1, None),
            ("quality", self.quality, 1, 100),
            ("num_workers", self.num_workers, 1, None),
        ):
            if value is not None and (value < low or (high is not None and value > high)):
                raise ShardError(f"{name}={value} must be at least {low:g}" + (f" and at most {high}" if high else ""))


class _Source(NamedTuple):
    """An image file."""

    path: str
    """Relative to src."""
    label: int
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class _Task:
    """One shard to write."""

    options: PackOptions
    number: int
    first_key: int
    sources: tuple[_Source, ...]

    @property
    def name(self) -> str:
        return f"{self.options.split}-{self.number:06d}.tar"


def pack(options: PackOptions) -> Index:
    """Writes the shards that are not there yet, then the index, to which the split is added."""
    classes, sources = _find(options, _index_so_far(options).classes)
    _warn_of_empty(options, classes, sources)
    tasks = _cut(options, sources)
    journal = Journal(options.out, options.split, _content(options, classes, tasks))
    written = journal.read()
    todo = [task for task in tasks if task.number not in written]
    faults: list[str] = []
    work = run_tasks(
        _write,
        todo,
        num_workers=options.num_workers,
        label=f"{options.split}: images",
        num_samples=sum(len(task.sources) for task in todo),
    )
    for task, result in work:
        if isinstance(result, Written):
            journal.add(task.number, result)
            written[task.number] = result
        else:
            faults += result
    if faults:
        shown = sorted(faults)[:NUM_FAULTS_SHOWN]
        raise ShardError(f"{len(faults)} images cannot be read; repair or remove them, then pack again:", *shown)
    results = [written[task.number] for task in tasks]
    split = Split(tuple(result.shard for result in results), ImageSizes.merged(result.sizes for result in results))
    # Another pack may have added its split meanwhile.
    before = _index_so_far(options)
    if before.splits and before.classes != classes:
        raise ShardError(
            f"{options.out / INDEX_NAME} has got other classes since this pack began: remove the shards of split "
            f"{options.split!r} and pack it again"
        )
    index = before.with_split(options.split, split, classes)
    index.write(options.out)
    journal.remove()
    return index


def _index_so_far(options: PackOptions) -> Index:
    """What the folder has already; an error if that is the split to be packed."""
    path = options.out / INDEX_NAME
    index = read_index(str(options.out)) if path.exists() else Index((), {})
    if options.split in index.splits:
        raise ShardError(f"{path} has a split {options.split!r} already: choose another split or out")
    if index.splits and not index.classes:
        raise ShardError(
            f"{path} has no classes for its splits ({', '.join(sorted(index.splits))}), and splits that share a folder "
            "share their classes: choose another out"
        )
    return index


def _find(options: PackOptions, known_classes: tuple[str, ...]) -> tuple[tuple[str, ...], list[_Source]]:
    """All images in an order that depends on names and seed only, and the classes that their labels count."""
    tops = sorted(_visible(options.src))
    found = [path.name for path in tops if path.is_dir()]
    classes = known_classes or tuple(found)
    if unknown := sorted(set(found) - set(classes)):
        raise ShardError(
            f"class {unknown[0]!r} of {options.src} is not among the {len(classes)} classes of "
            f"{options.out / INDEX_NAME}: splits that share a folder share their classes"
        )
    labels = {name: label for label, name in enumerate(classes)}
    sources = []
    for name in found:
        for path, about in sorted(_images(options.src / name, (options.src.resolve(),))):
            relative = path.relative_to(options.src).as_posix()
            sources.append(_Source(relative, labels[name], about.st_size, about.st_mtime_ns))
    if not sources:
        raise ShardError(f"src={options.src} has no images: it must hold one folder a class with images in it")
    if lost := [path for path in tops if _leads_nowhere(path)]:
        raise ShardError(f"{lost[0]} is a link that leads nowhere, perhaps to a class: repair or remove it")
    if all(source.path.count("/") > 1 for source in sources):
        raise ShardError(
            f"src={options.src}: no folder has images of its own, they lie further down, as {sources[0].path}: pack a "
            f"folder below, such as src={(options.src / sources[0].path).parents[1]}"
        )
    return classes, [sources[place] for place in permutation(len(sources), options.seed)]


def _images(folder: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, os.stat_result]]:
    """Images in a folder and below, also behind links; a link that leads nowhere may be one, and fails to be read."""
    real = folder.resolve()
    if any(other.is_relative_to(real) for other in above):
        raise ShardError(f"{folder} is a link to {real}, a folder that it lies in: remove it")
    for path in _visible(folder):
        if path.is_dir():
            yield from _images(path, (*above, real))
        elif _leads_nowhere(path):
            yield path, path.lstat()
        elif path.is_file() and path.suffix[1:].lower() in IMAGE_FIELDS:
            yield path, path.stat()


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _warn_of_empty(options: PackOptions, classes: tuple[str, ...], sources: list[_Source]) -> None:
    full = {source.label for source in sources}
    if empty := [name for label, name in enumerate(classes) if label not in full]:
        shown = ", ".join(empty[:NUM_FAULTS_SHOWN]) + ", ..." * (len(empty) > NUM_FAULTS_SHOWN)
        text = "src=%s has no images of %d of the %d classes, which keep their labels: %s"
        log.warning(text, options.src, len(empty), len(classes), shown)


def _cut(options: PackOptions, sources: list[_Source]) -> list[_Task]:
    """Consecutive samples for each shard: by the bytes of their sources, or in as many shards as asked for."""
    if options.shard_count is not None:
        count = options.shard_count
        if count > len(sources):
            raise ShardError(f"shard_count={count} is more than the {len(sources)} images: some shards would be empty")
        starts = [number * len(sources) // count for number in range(count)]
    else:
        starts, num_bytes = [0], 0.0
        for place, source in enumerate(sources):
            if num_bytes and num_bytes + source.num_bytes > 1e6 * options.shard_mb:
                starts.append(place)
                num_bytes = 0
            num_bytes += source.num_bytes
    stops = [*starts[1:], len(sources)]
    return [
        _Task(options, number, start, tuple(sources[start:stop]))
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def _content(options: PackOptions, classes: tuple[str, ...], tasks: list[_Task]) -> str:
    """Differs if the bytes of a shard would."""
    return json.dumps([options.resize, options.quality, classes, [task.sources for task in tasks]])


def _write(task: _Task) -> Written | list[str]:
    """Writes a shard; if images are damaged, says which and writes none."""
    faults: list[str] = []
    sizes: list[tuple[int, int]] = []

    def samples() -> Iterator[tuple[str, dict[str, bytes]]]:
        for key, source in enumerate(task.sources, task.first_key):
            path = task.options.src / source.path
            try:
                field, image = _encoded(path, task.options)
                sizes.append((image.width, image.height))
                yield f"{key:09d}", {field: image.data, "cls": str(source.label).encode()}
            except (OSError, ValueError) as error:
                target = f" (a link to {path.readlink()})" if path.is_symlink() else ""
                faults.append(f"{path}{target}: {error}")
            count_one()

    path = task.options.out / task.name
    shard = write_shard(path, samples())
    if faults:
        path.unlink()
        return faults
    return Written(shard, ImageSizes.of(sizes))


def _encoded(path: Path, options: PackOptions) -> tuple[str, Encoded]:
    """Field and bytes of an image: as they are, unless it is to be smaller or of another quality."""
    source = Encoded.of(path.read_bytes())
    short_side = min(source.width, source.height)
    resize = options.resize is not None and short_side > options.resize
    if not resize and options.quality is None:
        field = path.suffix[1:].lower()
        return ("jpg" if field == "jpeg" else field), source
    image = Image.fromarray(source.pixels())
    if resize:
        assert options.resize is not None
        factor = options.resize / short_side
        image = image.resize((round(source.width * factor), round(source.height * factor)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=options.quality or JPEG_QUALITY)
    return "jpg", Encoded.of(file.getvalue())
