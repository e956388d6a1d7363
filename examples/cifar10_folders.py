"""Writes the images of CIFAR-10's archive as folders, one a class, for `fourmin pack`.

Example: python examples/cifar10_folders.py cifar-10-python.tar.gz cifar10
"""

import argparse
import pickle
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image
from rich.progress import track

SPLITS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def load(archive: tarfile.TarFile, name: str) -> dict[str, Any]:
    """An object of the archive; pickles can run code, so take it from the data set's own page only."""
    file = archive.extractfile(f"cifar-10-batches-py/{name}")
    assert file is not None
    content: dict[str, Any] = pickle.load(file, encoding="latin1")
    return content


def write(archive: tarfile.TarFile, split: str, out: Path) -> None:
    classes = load(archive, "batches.meta")["label_names"]
    batches = [load(archive, name) for name in SPLITS[split]]
    samples = [sample for batch in batches for sample in zip(batch["data"], batch["labels"], strict=True)]
    for name in classes:
        (out / split / name).mkdir(parents=True, exist_ok=True)
    numbers: Counter[int] = Counter()
    for pixels, label in track(samples, split):
        image = Image.fromarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0))
        image.save(out / split / classes[label] / f"{numbers[label]:04d}.png")
        numbers[label] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="cifar-10-python.tar.gz, as published")
    parser.add_argument("out", type=Path, help="folder to write train/ and test/ into")
    arguments = parser.parse_args()
    try:
        with tarfile.open(arguments.archive) as archive:
            for split in SPLITS:
                write(archive, split, arguments.out)
    except (OSError, KeyError, tarfile.TarError) as error:
        parser.error(f"{arguments.archive} is not CIFAR-10's archive for Python, or cannot be read: {error}")


if __name__ == "__main__":
    main()
