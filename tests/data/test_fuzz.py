"""Any bytes in shards and index make clean samples, counted skips or a ShardError: nothing else, and no end of memory.

FUZZ_CASES=100000 makes a long run of it.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

from lightning_fourmin.data.dataset import ShardDataset
from lightning_fourmin.data.index import Index, Shard, Split, read_index
from lightning_fourmin.data.loader import EvalLoader, ShardLoader, TrainLoader
from lightning_fourmin.data.pack.verify import CheckTask, check_shard
from lightning_fourmin.data.partition import Partition
from lightning_fourmin.data.transforms import EvalImage, TrainImage
from lightning_fourmin.errors import ShardError
from tests.support.shards import jpeg

FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", 150)),
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_CASES" not in os.environ,
)
NUM_SAMPLES = 4
CLASSES = ("0", "1", "2", "3")
OPTIONS = {"num_workers": 0, "prefetch_factor": 2, "pin_memory": False}


def image(number: int) -> tuple[str, bytes]:
    if number == 0:
        return "jpg", jpeg(20, 15)
    file = io.BytesIO()
    kind = ("PNG", "WEBP", "GIF")[number - 1]
    Image.open(io.BytesIO(jpeg(9, 12))).save(file, kind)
    return kind.lower(), file.getvalue()


def tar(form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as out:
        for number in range(NUM_SAMPLES):
            field, data = image(number)
            for name, content in ((field, data), ("cls", str(number).encode())):
                info = tarfile.TarInfo(f"{'n' * 99 * (number == 2)}{number}.{name}")
                info.size = len(content)
                info.mtime = 0.5 if number else 0
                out.addfile(info, io.BytesIO(content))
    return file.getvalue()


TARS = [tar(form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
# Where the fields of a header lie: mostly these are changed.
FIELDS = (0, 100, 108, 124, 135, 136, 148, 156, 157, 257, 263, 345, 386, 482, 483)


@st.composite
def mutated_tars(draw: st.DrawFn) -> bytes:
    content = bytearray(draw(st.sampled_from(TARS)))
    for _ in range(draw(st.integers(1, 4))):
        block = 512 * draw(st.integers(0, len(content) // 512 - 1))
        match draw(st.sampled_from(("bytes", "header", "cut", "drop", "repeat"))):
            case "bytes":
                at = draw(st.integers(0, len(content) - 1))
                data = draw(st.binary(min_size=1, max_size=4))
                content[at : at + len(data)] = data
            case "header":
                at = block + draw(st.sampled_from(FIELDS))
                data = draw(st.sampled_from((b"\x80", b"\xff" * 12, b"7" * 11, b"x", b"g", b"L", b"S", b"5", b"-1\0")))
                content[at : at + len(data)] = data
                header = content[block : block + 512]
                header[148:156] = b" " * 8
                # With a right checksum the change is taken seriously.
                content[block + 148 : block + 156] = b"%06o\0 " % sum(header)
            case "cut":
                del content[draw(st.integers(1, len(content) - 1)) :]
            case "drop":
                del content[block : block + 512]
            case "repeat":
                content[block:block] = content[block : block + 512 * draw(st.integers(1, 3))]
        if len(content) < 512:
            break
    return bytes(content)


def consume(loader: ShardLoader) -> None:
    for pixels, labels in loader:
        assert pixels.shape[1:] == (8, 8, 3)
        assert all(0 <= label < len(CLASSES) for label in labels.tolist())


def read(folder: Path, on_error: str) -> None:
    """As in training and in evaluation."""
    split = read_index(str(folder)).split("train", str(folder))
    common: dict[str, Any] = {"seed": 0, "collate": default_collate, "on_error": on_error}
    for window, transform in ((3, TrainImage(8, len(CLASSES))), (0, EvalImage(8, len(CLASSES), resize=9))):
        data = ShardDataset(split, str(folder), window=window, transform=transform, **common)
        if window:
            consume(TrainLoader(data, Partition(1, 2, 1), 0, remainder="wrap", **OPTIONS))
        else:
            consume(EvalLoader(data, Partition(1, 2, 1), 0, **OPTIONS))


def error_of(work: Callable[..., None], *args: Any) -> str:
    """What it has to say that may go wrong; anything else that does fails the test."""
    try:
        work(*args)
    except ShardError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def empty(folder: Path) -> None:
    """File systems flush what replaces another file, which costs more than a case."""
    for path in folder.iterdir():
        path.unlink()


@FUZZ
@given(mutated_tars(), st.sampled_from(["raise", "omit", "repeat"]))
def test_any_bytes_in_a_shard(folder: Path, content: bytes, on_error: str) -> None:
    empty(folder)
    (folder / "train-0.tar").write_bytes(content)
    num_samples = min(NUM_SAMPLES, len(content) // 512)
    shard = Shard("train-0.tar", num_samples, len(content), "")
    Index(CLASSES, {"train": Split((shard,), None)}).write(folder)
    error = error_of(read, folder, on_error)
    assert not error or "train-0.tar" in error or "the split has 0 samples" in error
    assert error.isprintable()
    check_shard(CheckTask(str(folder / "train-0.tar"), "train-0.tar", True, len(CLASSES), shard))


@st.composite
def mutated_indices(draw: st.DrawFn) -> str:
    shard = {"name": "train-0.tar", "num_samples": NUM_SAMPLES, "num_bytes": len(TARS[0]), "sha256": "0"}
    sizes = {"num_images": 4, "smallest": [1, 1], "mean": [1.0, 1.0], "largest": [1, 1]}
    content: Any = {
        "format": 1,
        "classes": list(CLASSES),
        "splits": {"train": {"num_samples": 4, "num_bytes": 1, "shards": [shard], "image_sizes": sizes}},
    }
    anything = st.recursive(
        st.none() | st.booleans() | st.integers(-10, 5000) | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=4,
    )
    for _ in range(draw(st.integers(0, 2))):
        place = content
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list) or draw(st.integers(0, 3)) == 0:
                place[key] = draw(anything)
                break
            place = place[key]
    text = json.dumps(content)
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return text


@FUZZ
@given(mutated_indices())
def test_any_index(folder: Path, content: str) -> None:
    empty(folder)
    (folder / "train-0.tar").write_bytes(TARS[0])
    (folder / "index.json").write_bytes(content.encode(errors="surrogatepass"))
    assert error_of(read, folder, "omit").isprintable()
