"""Reading shards: images a second of one core, memory over many epochs, time to resume late in a large epoch.

Example: .venv/bin/python benchmarks/data.py IMAGES     # a folder with one folder a class, e.g. images of ImageNet
"""

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch.utils.data import default_collate
from webdataset.tariterators import tarfile_to_samples

from lightning_fourmin.data.dataset import ShardDataset
from lightning_fourmin.data.decode import Encoded
from lightning_fourmin.data.index import Index, Split, read_index
from lightning_fourmin.data.loader import TrainLoader
from lightning_fourmin.data.order import Span
from lightning_fourmin.data.pack.pack import PackOptions, pack
from lightning_fourmin.data.partition import Partition
from lightning_fourmin.data.transforms import TrainImage
from results import table, write
from stats import estimate, paired_ratio

SIZE = 224
BATCH_SIZE = 32
NUM_IMAGES = 25 * BATCH_SIZE
NUM_ROUNDS = 12
NUM_EPOCHS = 20
NUM_RESUMES = 5
FASTER_THAN_WEBDATASET = 1.35
SHARE_OF_BARE_LOOP = 0.9
LARGEST_GROWTH = 1.05
LARGEST_RESUME_S = 5.0


def pillow_crop(image: Image.Image) -> np.ndarray:
    """RandomResizedCrop and flip as a project with Pillow alone writes it."""
    width, height = image.size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            break
    else:
        w = h = min(width, height)
        left, top = (width - w) // 2, (height - h) // 2
    image = image.crop((left, top, left + w, top + h)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def plain_webdataset(folder: Path) -> Callable[[], None]:
    urls = sorted(str(path) for path in folder.glob("*.tar"))

    def epoch() -> None:
        pipeline = webdataset.DataPipeline(
            webdataset.SimpleShardList(urls),
            tarfile_to_samples(),
            webdataset.shuffle(256),
            webdataset.decode("pil"),
            webdataset.to_tuple("jpg", "cls"),
            webdataset.map_tuple(pillow_crop, int),
            webdataset.batched(BATCH_SIZE, collation_fn=default_collate),
        )
        for _ in pipeline:
            pass

    return epoch


def loader(folder: Path, split: Split, partition: Partition, num_workers: int = 0, window: int = 256) -> TrainLoader:
    transform = TrainImage(SIZE)
    dataset = ShardDataset(
        split, str(folder), seed=0, window=window, transform=transform, collate=default_collate, on_error="raise"
    )
    return TrainLoader(
        dataset, partition, 0, remainder="drop", num_workers=num_workers, prefetch_factor=2, pin_memory=False
    )


def our_loader(folder: Path) -> Callable[[], None]:
    ours = loader(folder, read_index(str(folder)).splits["train"], Partition(1, BATCH_SIZE, 1))

    def epoch() -> None:
        for _ in ours:
            pass

    return epoch


def bare_loop(images: list[bytes]) -> Callable[[], None]:
    """The same decoding and cropping of bytes that are in memory, without shards, order or batches."""
    transform, rng = TrainImage(SIZE), np.random.default_rng(0)

    def epoch() -> None:
        for data in images:
            transform.pixels(Encoded.of(data), rng)

    return epoch


def throughput(folder: Path, images: list[bytes]) -> tuple[dict[str, list[float]], str]:
    ways = {"webdataset": plain_webdataset(folder), "fourmin": our_loader(folder), "bare loop": bare_loop(images)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(NUM_ROUNDS + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds = time.process_time() - start
            # The first round warms up.
            if number:
                rates[name].append(len(images) / seconds)
    over_webdataset = paired_ratio([1 / rate for rate in rates["webdataset"]], [1 / rate for rate in rates["fourmin"]])
    over_bare = paired_ratio([1 / rate for rate in rates["bare loop"]], [1 / rate for rate in rates["fourmin"]])
    names = {
        "webdataset": 'webdataset, decode("pil"), Pillow\'s crop',
        "fourmin": "ShardDataModule's loader",
        "bare loop": "decode and crop alone, bytes in memory, no batches",
    }
    rows = [[names[name], str(estimate(values))] for name, values in rates.items()]
    lines = [
        f"Images a second of CPU time of one process with one thread, to {SIZE} px train "
        f"crops in batches of {BATCH_SIZE}; {len(images)} images from the page cache, the same for all, {NUM_ROUNDS} "
        "rounds alternated, medians [95 %]:",
        "",
        table(["way", "images/s"], rows),
        "",
        f"Against webdataset: {over_webdataset} (goal {FASTER_THAN_WEBDATASET}, "
        f"{'met' if over_webdataset.meets(FASTER_THAN_WEBDATASET) else 'missed'}). "
        f"Against the bare loop: {over_bare} (goal {SHARE_OF_BARE_LOOP}, "
        f"{'met' if over_bare.meets(SHARE_OF_BARE_LOOP) else 'missed'}).",
    ]
    return rates, "\n".join(lines)


def memory_mb() -> float:
    """What this process and its children hold, shared pages counted once."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total_kb = 0
    for pid in ("self", *children):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total_kb += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total_kb / 1e3


def memory(folder: Path) -> tuple[list[float], str]:
    ours = loader(
        folder, read_index(str(folder)).splits["train"], Partition(1, BATCH_SIZE, 1), num_workers=1, window=64
    )
    found = []
    for _ in range(NUM_EPOCHS):
        for _ in ours:
            pass
        found.append(memory_mb())
    early, late = statistics.median(found[2:7]), statistics.median(found[-5:])
    text = (
        f"Memory of the loop and its worker over {NUM_EPOCHS} epochs: {early:.0f} MB in epochs 3 to 7, {late:.0f} MB "
        f"in the last 5 (goal: at most {LARGEST_GROWTH:g}x, {'met' if late <= LARGEST_GROWTH * early else 'missed'})."
    )
    return found, text


def resume(folder: Path) -> tuple[list[float], str]:
    """From nothing to the first batch, on rank 0 of 8 with 4 workers, after 90 % of an epoch of a million samples."""
    shards = read_index(str(folder)).splits["train"].shards
    num_shards = -(-1_000_000 // shards[0].num_samples)
    with tempfile.TemporaryDirectory() as name:
        large = Path(name)
        # One real shard under many names.
        links = [f"train-{number:06d}.tar" for number in range(num_shards)]
        for link in links:
            (large / link).symlink_to(folder / shards[0].name)
        entries = [
            type(shards[0])(link, shards[0].num_samples, shards[0].num_bytes, shards[0].sha256) for link in links
        ]
        Index((), {"train": Split(tuple(entries), None)}).write(large)
        partition = Partition(8, BATCH_SIZE, 4)
        split = read_index(str(large)).splits["train"]
        state = loader(large, split, partition, window=1024).state_dict()
        whole = tuple(Span(*span) for span in state["left"])
        state["num_batches"] = int(0.9 * partition.num_batches(whole))
        state["left"] = [list(span) for span in partition.left(whole, state["num_batches"])]
        seconds = []
        for _ in range(NUM_RESUMES):
            start = time.perf_counter()
            fresh = loader(large, read_index(str(large)).splits["train"], partition, num_workers=4, window=1024)
            fresh.load_state_dict(state)
            batches = iter(fresh)
            next(batches)
            seconds.append(time.perf_counter() - start)
            del batches, fresh
    found = estimate(seconds)
    text = (
        f"Resume after 90 % of an epoch of {split.num_samples:,} samples, rank 0 of 8 with 4 workers: first batch "
        f"after {found} s, files in the page cache (goal: under {LARGEST_RESUME_S:g} s, "
        f"{'met' if found.low < LARGEST_RESUME_S else 'missed'})."
    )
    return seconds, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    found = sorted(path.resolve() for path in parser.parse_args().images.rglob("*") if path.is_file())
    torch.set_num_threads(1)
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        source, folder = Path(name) / "images", Path(name) / "shards"
        (source / "any").mkdir(parents=True)
        # Repeated to whole batches, so that all ways see the same images.
        for number, path in enumerate(islice(cycle(found), NUM_IMAGES)):
            (source / "any" / f"{number}.jpg").symlink_to(path)
        pack(PackOptions(source, folder, shard_count=4))
        images = [path.read_bytes() for path in islice(cycle(found), NUM_IMAGES)]
        data["images_per_s"], speed_text = throughput(folder, images)
        data["memory_mb"], memory_text = memory(folder)
        data["resume_s"], resume_text = resume(folder)
    write("data", "python benchmarks/data.py IMAGES", data, "\n\n".join([speed_text, memory_text, resume_text]))


if __name__ == "__main__":
    main()
