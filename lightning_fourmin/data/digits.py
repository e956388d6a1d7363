"""Demo data: scikit-learn's 1,797 digits of 8 x 8 pixels as shards, written on first use."""

import io
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_fourmin.data.index import ImageSizes, Index, Split
from lightning_fourmin.data.tar import write_shard
from lightning_fourmin.errors import ShardError
from lightning_fourmin.files import cache_folder

DIGITS = "digits"
"""The path that stands for this data."""
NUM_TRAIN = 1437
SHARD_SIZE = 240
"""The number of samples in a shard."""
NUM_SIDE = 8
"""Width and height of an image in pixels."""


def digits_folder() -> Path:
    """The folder of the shards, which are written if they are not there."""
    folder = cache_folder() / DIGITS
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The folder gets its name when it is complete, because other ranks look for it at the same time.
        with tempfile.TemporaryDirectory(prefix=f".{DIGITS}-", dir=folder.parent) as partial:
            try:
                _write(Path(partial))
                Path(partial).rename(folder)
            except OSError:
                # Another process was first.
                if not folder.exists():
                    raise
    return folder


def _write(folder: Path) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ShardError(
            f"the demo data comes from scikit-learn, which is not installed ({error}): pip install scikit-learn, or "
            "train with data of your own (`fourmin pack`)"
        ) from error
    images, labels = load_digits(return_X_y=True)
    pixels = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, NUM_SIDE, NUM_SIDE)
    samples = [
        (f"{number:09d}", {"png": _png(image), "cls": str(label).encode()})
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True))
    ]
    splits = {}
    for name, part in (("train", samples[:NUM_TRAIN]), ("val", samples[NUM_TRAIN:])):
        shards = [
            write_shard(folder / f"{name}-{number:06d}.tar", part[start : start + SHARD_SIZE])
            for number, start in enumerate(range(0, len(part), SHARD_SIZE))
        ]
        splits[name] = Split(tuple(shards), ImageSizes.of([(NUM_SIDE, NUM_SIDE)] * len(part)))
    Index(tuple(str(digit) for digit in range(10)), splits).write(folder)


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
