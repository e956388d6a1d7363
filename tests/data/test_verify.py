"""`fourmin verify`: finds every fault and says where it is; makes the index of shards, local or behind URLs."""

import functools
import http.server
import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import default_collate

from lightning_fourmin.data.datamodule import ShardDataModule
from lightning_fourmin.data.dataset import ShardDataset
from lightning_fourmin.data.index import Index, Shard, Split, read_index
from lightning_fourmin.data.loader import EvalLoader
from lightning_fourmin.data.pack.verify import Report, VerifyOptions, verify
from lightning_fourmin.data.partition import Partition
from lightning_fourmin.errors import ShardError
from tests.support.shards import jpeg, number_of, write_numbers, write_shard

NUM_SAMPLES = 6


def image_sample(number: int, **fields: Any) -> dict[str, Any]:
    return {"__key__": f"{number:03d}", "jpg": jpeg(20, 16, seed=number), "cls": number % 3} | fields


def image_samples(first: int = 0) -> list[dict[str, Any]]:
    return [image_sample(number) for number in range(first, first + NUM_SAMPLES)]


def write_images(folder: Path, *parts: list[dict[str, Any]]) -> None:
    shards = [write_shard(folder / f"train-{number:06d}.tar", part) for number, part in enumerate(parts)]
    Index(("a", "b", "c"), {"train": Split(tuple(shards), None)}).write(folder)


def check(folder: Path | str, **kwargs: Any) -> Report:
    return verify(VerifyOptions(str(folder), num_workers=1, **kwargs))


def test_good_shards_have_no_faults(tmp_path: Path) -> None:
    write_images(tmp_path, image_samples(), image_samples(NUM_SAMPLES))
    assert check(tmp_path).faults == ()
    assert check(tmp_path, decode=True).faults == ()


def overwrite(path: Path, start: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)


def member_offset(path: Path, name: str) -> int:
    """Where the header of a member starts, found without tarfile."""
    return path.read_bytes().rindex(name.encode() + b"\0")


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "changed byte in an image",
        lambda path: overwrite(path, member_offset(path, "002.jpg") + 512 + 300, b"\xa5\x5a"),
        "has sha256 {sha}, but the index says",
    ),
    (
        "truncated in a member",
        lambda path: path.write_bytes(path.read_bytes()[: member_offset(path, "004.jpg") + 700]),
        "member 004.jpg at offset {004.jpg} cannot be read: unexpected end of data",
    ),
    (
        "truncated between members",
        lambda path: path.write_bytes(path.read_bytes()[: member_offset(path, "004.cls")]),
        "is truncated: it has no end mark at offset {004.cls}",
    ),
    (
        "damaged header",
        lambda path: overwrite(path, member_offset(path, "003.cls") + 150, b"garbage!"),
        "the header at offset {003.cls} is damaged: what comes after it cannot be read",
    ),
    ("no tar at all", lambda path: path.write_bytes(b"hello " * 500), "is not a readable tar file"),
    ("missing", lambda path: path.unlink(), "cannot be read: .* No such file"),
]


@pytest.mark.parametrize(("damage", "fault"), [pytest.param(d, f, id=name) for name, d, f in DAMAGE])
def test_damaged_bytes(tmp_path: Path, damage: Callable[[Path], None], fault: str) -> None:
    write_images(tmp_path, image_samples(), image_samples(NUM_SAMPLES))
    path = tmp_path / "train-000000.tar"
    offsets = {name: member_offset(path, name) for name in ("003.cls", "004.cls", "004.jpg")}
    damage(path)
    faults = check(tmp_path).faults
    pattern = re.sub(r"\{(.*?)\}", lambda match: str(offsets.get(match[1], r"\w+")), fault)
    assert [text for text in faults if re.search(f"^train-000000.tar:? {pattern}", text)], faults
    assert all(text.startswith("train-000000.tar") for text in faults)


BAD_SAMPLES = [
    (image_sample(9, cls=3), "009.cls", "member 009.cls at offset {} has class 3, but the index has classes 0 to 2"),
    (image_sample(9, cls="owl"), "009.cls", "member 009.cls at offset {} is not an integer"),
    (
        {"__key__": "009", "jpg": jpeg(8, 8)},
        "009.jpg",
        "sample 009 at offset {} has an image, but most samples of the shard have an image, cls",
    ),
    (image_sample(9, jpg=b"no image"), "009.jpg", "member 009.jpg at offset {} is not a readable image"),
    (image_sample(1), "001.cls", "sample 001 at offset {}: its key was there before"),
]


@pytest.mark.parametrize(("sample", "member", "fault"), BAD_SAMPLES)
def test_bad_samples(tmp_path: Path, sample: dict[str, Any], member: str, fault: str) -> None:
    write_images(tmp_path, [*image_samples(), sample])
    (found,) = check(tmp_path).faults
    assert found.startswith("train-000000.tar: " + fault.format(member_offset(tmp_path / "train-000000.tar", member)))


def test_a_truncated_image_needs_decoding(tmp_path: Path) -> None:
    data = jpeg(200, 160)
    write_images(tmp_path, [*image_samples(), image_sample(9, jpg=data[: len(data) // 2])])
    assert check(tmp_path).faults == ()
    (found,) = check(tmp_path, decode=True).faults
    assert re.match(r"train-000000.tar: member 009.jpg at offset \d+ is not a readable image: ", found)


def test_grey_without_a_known_white_needs_decoding(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.ones((9, 9), np.float32)).save(file, "TIFF")
    write_images(tmp_path, [{"__key__": "009", "tif": file.getvalue(), "cls": 0}])
    assert check(tmp_path).faults == ()
    (found,) = check(tmp_path, decode=True).faults
    assert re.match(r"train-000000.tar: member 009.tif at offset \d+ is not a readable image: it is 32-bit", found)


def test_faults_of_the_folder(tmp_path: Path) -> None:
    write_images(tmp_path, image_samples(), [], image_samples(20), image_samples(30))
    index = read_index(str(tmp_path))
    shards = index.splits["train"].shards
    first = Shard(shards[0].name, 5, shards[0].num_bytes, shards[0].sha256)
    Index(index.classes, {"train": Split((first, shards[1], shards[3]), None)}).write(tmp_path)
    assert check(tmp_path).faults == (
        "train-000000.tar has num_samples 6, but the index says 5",
        "train-000001.tar is empty: it has no samples",
        "train-000003.tar follows number 1: shards in between are missing",
        "train-000002.tar is in the folder but not in the index",
    )


def test_index_of_existing_shards(tmp_path: Path) -> None:
    expected = write_numbers(tmp_path, [4, 3])
    (tmp_path / "index.json").unlink()
    write_shard(tmp_path / "val-0.tar", image_samples())
    report = check(tmp_path, index=True)
    assert report.faults == ()
    index = read_index(str(tmp_path))
    assert index == report.index
    assert index.splits["train"].shards == expected.shards
    assert index.classes == tuple(map(str, range(7)))
    sizes = index.splits["val"].image_sizes
    assert sizes is not None
    assert (sizes.num_images, sizes.smallest, sizes.largest) == (NUM_SAMPLES, (20, 16), (20, 16))
    assert check(tmp_path).faults == ()
    with pytest.raises(ShardError, match=r"index.json is there already"):
        check(tmp_path, index=True)


def test_an_index_that_goes_to_the_shards_themselves_can_be_moved_with_them(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_numbers(tmp_path / "shards", [4, 3])
    (tmp_path / "shards" / "index.json").unlink()
    assert check(tmp_path / "shards", index=True, out=tmp_path / "shards").faults == ()
    (tmp_path / "shards").rename(tmp_path / "moved")
    assert check(tmp_path / "moved").faults == ()


def test_index_of_shards_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of shards in a folder that cannot be written to."""
    (tmp_path / "shards").mkdir()
    write_numbers(tmp_path / "shards", [4, 3])
    (tmp_path / "shards" / "index.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert check("shards", index=True, out=tmp_path / "indexes").faults == ()
    assert [path.name for path in (tmp_path / "shards").iterdir() if path.suffix != ".tar"] == []
    monkeypatch.chdir("/")
    assert check(tmp_path / "indexes").faults == ()


def test_no_index_of_damaged_shards(tmp_path: Path) -> None:
    write_images(tmp_path, image_samples(), image_samples(NUM_SAMPLES), image_samples(20))
    (tmp_path / "index.json").unlink()
    (tmp_path / "train-000001.tar").unlink()
    assert check(tmp_path, index=True).faults == ("train-000002.tar follows number 0: shards in between are missing",)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("label", [-1, 1_000_000, 10**12])
def test_no_index_of_labels_that_are_no_classes(tmp_path: Path, label: int) -> None:
    write_shard(tmp_path / "train-0.tar", [image_sample(0), image_sample(1, cls=label), image_sample(2)])
    offset = member_offset(tmp_path / "train-0.tar", "001.cls")
    report = check(tmp_path, index=True)
    (fault,) = report.faults
    assert fault == (
        f"train-0.tar: member 001.cls at offset {offset} has class {label}, but classes are 0 to 999999 at most"
    )
    assert len(report.index.classes) == 3
    assert not (tmp_path / "index.json").exists()


def test_samples_without_labels_have_no_classes(tmp_path: Path) -> None:
    array = np.arange(3)
    write_shard(tmp_path / "train-0.tar", [{"__key__": "a", "npy": array}, {"__key__": "b", "npy": array}])
    assert check(tmp_path, index=True).faults == ()
    assert read_index(str(tmp_path)).classes == ()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A local HTTP server of tmp_path/served."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def numbers(path: str, pipes: bool = False) -> list[int]:
    """What the two ranks of an evaluation read, the second one from the middle of a shard on."""
    data = ShardDataset(
        read_index(path, pipes=pipes).splits["train"],
        path,
        seed=0,
        window=0,
        transform=number_of,
        collate=default_collate,
        on_error="raise",
    )
    options = {"num_workers": 0, "prefetch_factor": 2, "pin_memory": False}
    loaders = [EvalLoader(data, Partition(2, 4, 1), rank, **options) for rank in range(2)]
    return [number for loader in loaders for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("kind", ["http", "pipe"])
def test_shards_behind_urls(server: str, tmp_path: Path, kind: str) -> None:
    served = tmp_path / "served"
    write_numbers(served, [3, 0, 6, 2])
    start = f"{server}/" if kind == "http" else f"pipe:cat {served}/"
    pipes = kind == "pipe"
    report = check(f"{start}train-{{000000..000003}}.tar", index=True, out=tmp_path, pipes=pipes)
    assert report.faults == (f"{start}train-000001.tar is empty: it has no samples",)
    (served / "train-000001.tar").unlink()
    (served / "train-000002.tar").rename(served / "train-000001.tar")
    (served / "train-000003.tar").rename(served / "train-000002.tar")
    assert check(f"{start}train-{{000000..000002}}.tar", index=True, out=tmp_path, pipes=pipes).faults == ()
    assert numbers(str(tmp_path), pipes) == list(range(11))
    if kind == "http":
        (served / "index.json").unlink()
        check(served, index=True)
        assert check(server).faults == ()
        assert numbers(server) == list(range(11))
        (served / "train-000001.tar").write_bytes((served / "train-000001.tar").read_bytes()[:3000])
        with pytest.raises(
            ShardError, match=r"train-000001.tar: the member at offset \d+ cannot be read: unexpected end"
        ):
            numbers(server)
        (served / "train-000001.tar").unlink()
        with pytest.raises(ShardError, match=r"train-000001.tar"):
            numbers(server)


def test_pipes_must_be_allowed(tmp_path: Path) -> None:
    evil = f"pipe:touch {tmp_path}/touched; cat train-0.tar"
    Index((), {"train": Split((Shard(evil, 1, 10240, ""),), None)}).write(tmp_path)
    message = "would run a command: set pipes=true if you trust who wrote it"
    for attempt in (
        lambda: check(tmp_path),
        lambda: ShardDataModule(str(tmp_path), 1).train_dataloader(),
        lambda: check(evil, index=True, out=tmp_path / "out"),
        lambda: read_index("pipe:cat shards"),
    ):
        with pytest.raises(ShardError, match=f"^'pipe:.*' {message}"):
            attempt()
    assert not (tmp_path / "touched").exists()
    assert len(check(tmp_path, pipes=True).faults) == 1
    assert (tmp_path / "touched").exists()


def test_urls_of_a_kind_that_nothing_opens(tmp_path: Path) -> None:
    Index((), {"train": Split((Shard("ftp://host/train-0.tar", 1, 10240, ""),), None)}).write(tmp_path)
    assert check(tmp_path).faults == (
        "ftp://host/train-0.tar cannot be read: ftp://host/train-0.tar: no gopen handler defined",
    )


def test_an_index_of_urls_needs_a_place(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="say with out=DIR where its index goes"):
        check("http://localhost/train-0.tar", index=True)


def index_of(**change: Any) -> str:
    shard = {"name": "train-0.tar", "num_samples": 2, "num_bytes": 1024, "sha256": ""} | change
    splits = {"train": {"shards": [shard], "image_sizes": None}}
    return json.dumps({"format": 1, "classes": [], "splits": splits})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: pack the shards with `fourmin pack`, or make the index of existing ones"),
        ("{", "is not an index of shards"),
        ('{"format": 1, "classes": []}', "is not an index of shards .*'splits'"),
        ('{"format": 2}', "has format 2, but this version reads format 1"),
        ("[" * 100_000, r"is not an index of shards \(RecursionError"),
        (index_of(num_samples="2"), r"is not an index of shards \(TypeError: '2' is not int\)"),
        (index_of(num_samples=3), "train-0.tar cannot have 3 samples in 1024 bytes"),
        (index_of(num_bytes=1 << 80), "train-0.tar cannot have 2 samples in"),
    ],
)
def test_an_index_that_cannot_be_read(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(ShardError, match=message):
        check(tmp_path)


def test_samples_without_label_or_image_are_counted(tmp_path: Path) -> None:
    texts = [{"__key__": f"{number:03d}", "txt": "a word"} for number in range(4)]
    write_shard(tmp_path / "train-000000.tar", texts)
    write_shard(tmp_path / "val-000000.tar", image_samples())
    report = check(tmp_path, index=True)
    assert report.faults == ()
    assert report.num_lacking == {
        "train": {"a label (cls)": 4, "an image": 4},
        "val": {"a label (cls)": 0, "an image": 0},
    }
    assert report.index.classes == ()


@pytest.mark.parametrize("name", ["../000.txt", "/tmp/000.txt", "a/../../000.txt"])
def test_names_that_lead_out_of_a_folder(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 4
        tar.addfile(info, io.BytesIO(b"word"))
    (fault,) = check(tmp_path, index=True).faults
    assert fault == f"train-000000.tar: member {name} at offset 0 has a name that leads out of a folder"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_named(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        info = tarfile.TarInfo("000.txt")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"word"))
        link = tarfile.TarInfo("001.txt")
        link.type, link.linkname = kind, "/etc/passwd"
        tar.addfile(link)
    (fault,) = check(tmp_path, index=True).faults
    assert fault == "train-000000.tar: member 001.txt at offset 1024 is a link, which is no part of a sample"
