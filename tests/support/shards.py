"""Small shards for tests, written by webdataset and indexed without the code under test."""

import hashlib
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from webdataset.writer import TarWriter

from lightning_fourmin.data.index import Index, Shard, Split
from lightning_fourmin.data.sample import Sample


def write_shard(path: Path, samples: Sequence[dict[str, Any]]) -> Shard:
    with path.open("wb") as file:
        writer = TarWriter(file, mtime=0)
        for sample in samples:
            writer.write(sample)
        writer.close()
    content = path.read_bytes()
    return Shard(path.name, len(samples), len(content), hashlib.sha256(content).hexdigest())


def write_numbers(
    folder: Path, shard_sizes: Sequence[int], split: str = "train", damaged: Collection[int] = ()
) -> Split:
    """Shards whose samples hold their own number in field `cls`, unless they are damaged."""
    shards, first = [], 0
    for number, size in enumerate(shard_sizes):
        samples = [{"__key__": f"{n:06d}", "cls": "damaged" if n in damaged else n} for n in range(first, first + size)]
        shards.append(write_shard(folder / f"{split}-{number:06d}.tar", samples))
        first += size
    made = Split(tuple(shards), image_sizes=None)
    Index((), {split: made}).write(folder)
    return made


def number_of(sample: Sample, rng: np.random.Generator) -> int:
    """A transform that gives the number that `write_numbers` wrote."""
    assert sample.integer() == sample.number
    return sample.integer()


def jpeg(width: int, height: int, seed: int = 0, quality: int = 90, mode: str = "RGB") -> bytes:
    """A smooth image, so that decoders that differ a little agree a lot."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, len(mode)), dtype=np.uint8)
    if mode == "L":
        coarse = coarse[:, :, 0]
    image = Image.fromarray(coarse, mode=None).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.convert(mode).save(file, "JPEG", quality=quality)
    return file.getvalue()
