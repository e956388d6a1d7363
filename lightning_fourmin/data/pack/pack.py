"""Packs a folder of images, one folder a class, into shards with an index.

    main process                                          worker processes
    finds the images, puts them in order, cuts tasks  ->  _write: writes the shard of a task, from image files to tar
    journal: notes which shards are complete          <-  name, size and checksum of the shard, or the faults
    writes the index, removes the journal

The bytes of a shard depend on the images and the options alone, not on how many processes work. A pack that was killed
continues when it is called again: shards that are complete, and would be the same, are kept.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lightning_fourmin.data.decode import IMAGE_FIELDS, Encoded
from lightning_fourmin.data.index import INDEX_NAME, ImageSizes, Index, Shard, Split, parse_sizes, read_index
from lightning_fourmin.data.order import permutation
from lightning_fourmin.data.pack.process_pool import count_one, run_tasks
from lightning_fourmin.data.tar import write_shard
from lightning_fourmin.errors import ShardError
from lightning_fourmin.files import check_writable, write_whole

log = logging.getLogger(__name__)

NUM_FAULTS_SHOWN = 10
JPEG_QUALITY = 95
"""The quality of images that are resized, unless another one is given."""


@dataclass(frozen=True)
class PackOptions:
    """What to pack and how."""

    src: Path
    """Folder with one folder a class."""
    out: Path
    """Folder for the shards and the index. Several splits may share it."""
    split: str = "train"
    """Name of the split in the index, and the first part of the names of its shards."""
    shard_mb: float = 128.0
    """The size of the source images of a shard together, in 10^6 bytes."""
    shard_count: int | None = None
    """Number of shards, instead of shard_mb."""
    seed: int = 0
    """Seed of the order of the samples."""
    resize: int | None = None
    """Pixels of the short side of images that are larger; they become JPEG. None: images stay as they are."""
    quality: int | None = None
    """JPEG quality, 1 to 100. Without resize it makes all images JPEG. None: 95 for images that are resized."""
    num_workers: int | None = None
    """The number of worker processes; None: one for each core."""

    def __post_init__(self) -> None:
        if not self.src.is_dir():
            raise ShardError(f"src={self.src} is not a folder")
        if self.out.resolve().is_relative_to(self.src.resolve()):
            raise ShardError(
                f"out={self.out} is or lies in src={self.src}, where folders are classes: choose another out"
            )
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
    """The number of samples in the shards before it: the key of its first sample."""
    sources: tuple[_Source, ...]

    @property
    def name(self) -> str:
        return f"{self.options.split}-{self.number:06d}.tar"


@dataclass(frozen=True)
class _Written:
    """A shard that is complete."""

    shard: Shard
    sizes: ImageSizes | None


def pack(options: PackOptions) -> Index:
    """Writes the shards that are not there yet, then the index, to which the split is added."""
    classes, sources = _find(options, _index_so_far(options).classes)
    check_writable(options.out)
    _warn_of_empty(options, classes, sources)
    tasks = _cut(options, sources)
    # What the bytes of the shards depend on.
    content = json.dumps([options.resize, options.quality, classes, [task.sources for task in tasks]])
    journal = _Journal(options.out, options.split, content)
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
        if isinstance(result, _Written):
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
    index = Index(classes, before.splits | {options.split: split})
    index.write(options.out)
    journal.remove()
    return index


def _index_so_far(options: PackOptions) -> Index:
    """The index that the folder has already. It is an error if the split to be packed is in it."""
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
    """The classes, and all images in an order that depends on nothing but their names and the seed."""
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
    """The images in a folder and below it, also behind links.

    A link that leads nowhere is yielded, too: it may have been an image, and its reading will fail and say so.
    """
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
    """The tasks: consecutive samples for each shard, by the bytes of their sources or in a given number of shards."""
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


class _Journal:
    """Remembers which shards of an unfinished pack are complete, in a hidden folder beside them with a file for each.

    Only the main process uses it.
    """

    def __init__(self, out: Path, split: str, content: str) -> None:
        self._out = out
        self._split = split
        self._folder = out / f".pack-{split}"
        self._fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def read(self) -> dict[int, _Written]:
        """The shards that are complete, by number. They are removed instead if their content would be another now."""
        plan = self._folder / "plan"
        entries = {}
        for path in self._folder.glob("*.json"):
            with suppress(ValueError):  # cut short by a power failure: that shard is written again
                entries[int(path.stem)] = json.loads(path.read_text())
        if not plan.exists() or plan.read_text() != self._fingerprint:
            for entry in entries.values():
                (self._out / entry["shard"]["name"]).unlink(missing_ok=True)
            self.remove()
            if strangers := sorted(self._shards("{}.tar")):
                raise ShardError(
                    f"{strangers[0]} is there, but no index has it: remove the shards of split {self._split!r}, or "
                    f"index them with `fourmin verify path={self._out} index=true`"
                )
            write_whole(plan, self._fingerprint)
            return {}
        return {
            number: _Written(Shard(**entry["shard"]), parse_sizes(entry["sizes"]))
            for number, entry in entries.items()
            if (path := self._out / entry["shard"]["name"]).exists()
            and path.stat().st_size == entry["shard"]["num_bytes"]
        }

    def add(self, number: int, written: _Written) -> None:
        write_whole(self._folder / f"{number:06d}.json", json.dumps(asdict(written)))

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for partial in self._shards(".{}.tar.part"):
            partial.unlink()

    def _shards(self, form: str) -> list[Path]:
        """The files of the split's shards. Those of `train-extra` are not those of `train`."""
        name = re.compile(re.escape(form).replace(r"\{\}", rf"{re.escape(self._split)}-\d+"))
        return [path for path in self._out.glob("*") if name.fullmatch(path.name)]


def _write(task: _Task) -> _Written | list[str]:
    """Called in a worker: writes the shard of a task. If images are damaged, it removes it and returns the faults."""
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
    return _Written(shard, ImageSizes.of(sizes))


def _encoded(path: Path, options: PackOptions) -> tuple[str, Encoded]:
    """The field and the bytes of an image: its file as it is, unless it is to be smaller or of another quality."""
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
