"""Checks every byte of shards, and makes the index of shards that have none."""

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from webdataset.shardlists import expand_urls

from lightning_fourmin.data.index import INDEX_NAME, ImageSizes, Index, Split, read_index
from lightning_fourmin.data.pack.check_shard import Checked, CheckTask, check_shard
from lightning_fourmin.data.pack.process_pool import run_tasks
from lightning_fourmin.data.urls import is_url, joined_location, refuse_pipes
from lightning_fourmin.errors import ShardError

# The split and the number in a shard's name: train-000012.tar, imagenet_val_3.tar, 00004.tar.
_NAME = re.compile(r"([^/\s]*?)[-_]?(\d+)\.tar")


@dataclass(frozen=True)
class VerifyOptions:
    """What to check and how."""

    path: str
    """Folder or URL with an index; without an index also URLs of shards: http://host/train-{000..146}.tar."""
    index: bool = False
    """Makes the index of shards that have none."""
    out: Path | None = None
    """Where that index goes. None: the folder itself."""
    decode: bool = False
    """Decodes every image, too."""
    pipes: bool = False
    """Whether shards may be `pipe:` URLs, which run commands."""
    num_workers: int | None = None
    """Processes; None: one a core."""

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise ShardError(f"num_workers={self.num_workers} must be at least 1")


@dataclass(frozen=True)
class Report:
    """What was found."""

    index: Index
    faults: tuple[str, ...]
    """Each names shard, member and offset."""


def verify(options: VerifyOptions) -> Report:
    """Checks all shards of an index, or makes the index if there are no faults."""
    if options.index:
        return _make_index(options)
    index = read_index(options.path, pipes=options.pipes)
    tasks = [
        CheckTask(joined_location(options.path, shard.name), shard.name, options.decode, len(index.classes), shard)
        for split in index.splits.values()
        for shard in split.shards
    ]
    checked = _check(tasks, options.num_workers, sum(split.num_samples for split in index.splits.values()))
    faults = [fault for task in tasks for fault in checked[task].faults]
    for split in index.splits.values():
        faults += _gaps([shard.name for shard in split.shards])
    if not is_url(options.path):
        indexed = {task.name for task in tasks}
        strangers = sorted(path.name for path in Path(options.path).glob("*.tar") if path.name not in indexed)
        faults += [f"{name} is in the folder but not in the index" for name in strangers]
    return Report(index, tuple(faults))


def _make_index(options: VerifyOptions) -> Report:
    out = options.out or Path(options.path)
    if options.out is None and is_url(options.path):
        raise ShardError(f"path={options.path} is a URL: say with out=DIR where its index goes")
    if (out / INDEX_NAME).exists():
        raise ShardError(f"{out / INDEX_NAME} is there already: verify without index=true, or remove it first")
    names_of = _find(options)
    tasks = {
        split: [CheckTask(joined_location(options.path, name), name, options.decode, 0, None) for name in names]
        for split, names in names_of.items()
    }
    checked = _check([task for part in tasks.values() for task in part], options.num_workers, None)
    faults = [fault for part in tasks.values() for task in part for fault in checked[task].faults]
    for names in names_of.values():
        faults += _gaps(names)
    splits = {
        split: Split(
            tuple(checked[task].shard for task in part), ImageSizes.merged(checked[task].sizes for task in part)
        )
        for split, part in tasks.items()
    }
    labels = [result.largest_label for result in checked.values()]
    classes = () if None in labels else tuple(str(label) for label in range(1 + max(label or 0 for label in labels)))
    index = Index(classes, splits)
    if not faults:
        index.write(out)
    return Report(index, tuple(faults))


def _find(options: VerifyOptions) -> dict[str, list[str]]:
    """Names of shards by split."""
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
    """Shards that the numbering leaves out."""
    numbers = sorted((int(match[2]), name) for name in names if (match := _NAME.search(name)))
    return [
        f"{name} follows number {before}: shards in between are missing"
        for (before, _), (number, name) in pairwise(numbers)
        if number != before + 1
    ]


def _check(tasks: list[CheckTask], num_workers: int | None, num_samples: int | None) -> dict[CheckTask, Checked]:
    return dict(run_tasks(check_shard, tasks, num_workers=num_workers, label="samples", num_samples=num_samples))
