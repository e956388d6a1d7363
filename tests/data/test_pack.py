"""`fourmin pack`: readable by webdataset, the same bytes for any number of workers, continues after it was killed."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from lightning_fourmin.data.index import read_index
from lightning_fourmin.data.pack import pack as pack_file
from lightning_fourmin.data.pack.pack import PackOptions, pack
from lightning_fourmin.errors import ShardError
from tests.faults.test_launchers import running
from tests.support.shards import jpeg, write_numbers

CLASSES = ("cat", "dog", "owl")
NUM_A_CLASS = 14


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG images of several sizes in three classes, one of them in a folder below, and a PNG."""
    src = tmp_path_factory.mktemp("images")
    for label, name in enumerate(CLASSES):
        (src / name / "more").mkdir(parents=True)
        for number in range(NUM_A_CLASS):
            below = "more" if number == 3 else ""
            suffix = "JPEG" if number % 2 else "jpg"
            data = jpeg(40 + number, 30 + label, seed=100 * label + number)
            (src / name / below / f"{name}.{number}.{suffix}").write_bytes(data)
    (src / "owl" / "line.png").write_bytes(png(90, 20))
    (src / "owl" / "notes.txt").write_text("not an image")
    return src


def packed(images: Path, out: Path, **kwargs: Any) -> dict[str, bytes]:
    """The bytes of all files that packing makes."""
    pack(PackOptions(**{"src": images, "out": out, "shard_count": 5, "num_workers": 2} | kwargs))
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def samples(out: Path) -> list[dict[str, Any]]:
    """What webdataset reads."""
    found: list[dict[str, Any]] = []
    for path in sorted(out.glob("*.tar")):
        # Opened here, because webdataset leaves files open.
        with path.open("rb") as stream:
            found += group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}]))
    return found


def sources(images: Path) -> set[tuple[bytes, int]]:
    suffixes = (".jpg", ".JPEG", ".png")
    found = [path for path in images.rglob("*") if path.suffix in suffixes]
    return {(path.read_bytes(), CLASSES.index(path.relative_to(images).parts[0])) for path in found}


def test_webdataset_reads_every_image_with_its_class(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path)
    found = samples(tmp_path)
    pairs = [(sample.get("jpg") or sample["png"], int(sample["cls"])) for sample in found]
    assert set(pairs) == sources(images)
    assert len(pairs) == len(CLASSES) * NUM_A_CLASS + 1
    assert [sample["__key__"] for sample in found] == [f"{number:09d}" for number in range(len(found))]
    labels = [label for _, label in pairs]
    assert labels != sorted(labels)


def test_the_same_bytes_for_any_number_of_workers(images: Path, tmp_path: Path) -> None:
    one = packed(images, tmp_path / "one", num_workers=1)
    assert packed(images, tmp_path / "three", num_workers=3) == one
    assert sorted(one) == ["index.json", *(f"train-{number:06d}.tar" for number in range(5))]
    other = packed(images, tmp_path / "seed", seed=1)
    assert other["train-000000.tar"] != one["train-000000.tar"]


def write_ppm(path: Path, grey: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"P6 1 1 255\n" + bytes([grey] * 3))


def test_the_same_bytes_as_ever(tmp_path: Path) -> None:
    """As of version 0.1.0: names that sorting as text or as paths puts in another order."""
    cats = ("b.ppm", "b/c.ppm", "b-1.ppm", "B.ppm", "10.ppm", "9.ppm", "b/a/z.ppm")
    dogs = ("a.b/1.ppm", "a/1.ppm", "a.ppm", "x y.ppm")
    for number, name in enumerate([f"cat/{name}" for name in cats] + [f"dog/{name}" for name in dogs]):
        write_ppm(tmp_path / "src" / name, number)
    files = packed(tmp_path / "src", tmp_path / "out", shard_count=2, num_workers=1)
    content = files["train-000000.tar"] + files["train-000001.tar"]
    expected = "2a584f12a759cf8fb3fcab8a6e0e7a9472cc77a5f4bd38811a7218862535add7"
    assert hashlib.sha256(content).hexdigest() == expected


def test_index(images: Path, tmp_path: Path) -> None:
    files = packed(images, tmp_path)
    content = json.loads(files["index.json"])
    assert content["classes"] == list(CLASSES)
    split = content["splits"]["train"]
    assert split["num_samples"] == 43
    assert split["num_bytes"] == sum(len(data) for name, data in files.items() if name.endswith(".tar"))
    sizes = split["image_sizes"]
    assert (sizes["num_images"], sizes["smallest"], sizes["largest"]) == (43, [40, 20], [90, 32])
    widths = [40 + number for number in range(NUM_A_CLASS)] * 3 + [90]
    assert sizes["mean"][0] == pytest.approx(sum(widths) / 43)
    assert read_index(str(tmp_path)).splits["train"].num_samples == 43


def test_shard_mb_bounds_the_sources_of_a_shard(images: Path, tmp_path: Path) -> None:
    total = sum(len(data) for data, _ in sources(images))
    files = packed(images, tmp_path, shard_count=None, shard_mb=total / 4e6)
    found = samples(tmp_path)
    by_shard: dict[str, int] = {}
    for sample in found:
        data = sample.get("jpg") or sample["png"]
        by_shard[sample["__url__"]] = by_shard.get(sample["__url__"], 0) + len(data)
    assert len(by_shard) == len(files) - 1 == 5
    assert all(0.7 * total / 4 < size <= total / 4 for size in list(by_shard.values())[:-1])


@pytest.mark.parametrize(("resize", "quality"), [(16, None), (16, 50), (None, 50)])
def test_images_made_smaller(images: Path, tmp_path: Path, resize: int | None, quality: int | None) -> None:
    packed(images, tmp_path, resize=resize, quality=quality)
    num_bytes = 0
    for sample in samples(tmp_path):
        image = Image.open(io.BytesIO(sample["jpg"]))
        assert min(image.size) == resize or (resize is None and min(image.size) >= 20)
        num_bytes += len(sample["jpg"])
    assert num_bytes < sum(len(data) for data, _ in sources(images))


def test_grey_of_16_bits_made_smaller(tmp_path: Path) -> None:
    (tmp_path / "src" / "a").mkdir(parents=True)
    Image.fromarray(np.full((40, 40), 100 * 257, np.uint16)).save(tmp_path / "src" / "a" / "1.png")
    packed(tmp_path / "src", tmp_path / "out", shard_count=1, resize=20)
    (sample,) = samples(tmp_path / "out")
    assert np.asarray(Image.open(io.BytesIO(sample["jpg"]))).tolist() == [[[100] * 3] * 20] * 20


def test_resize_leaves_small_images_as_they_are(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path, resize=64)
    pairs = {(sample.get("jpg") or sample["png"], int(sample["cls"])) for sample in samples(tmp_path)}
    assert pairs == sources(images)


def test_splits_share_a_folder_and_its_classes(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path)
    val = tmp_path / "val_images" / "owl"
    val.mkdir(parents=True)
    (val / "1.jpg").write_bytes(jpeg(8, 8))
    pack(PackOptions(val.parent, tmp_path, split="val"))
    index = read_index(str(tmp_path))
    assert sorted(index.splits) == ["train", "val"]
    assert index.classes == CLASSES
    assert samples(tmp_path)[-1]["cls"] == b"2"
    (val.parent / "yak").mkdir()
    with pytest.raises(ShardError, match=r"class 'yak' of .* is not among the 3 classes of"):
        pack(PackOptions(val.parent, tmp_path, split="test"))


def test_a_folder_whose_splits_have_no_classes(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbers(tmp_path, [3], split="val")
    monkeypatch.setattr(pack_file, "run_tasks", None)
    message = r"index.json has no classes for its splits \(val\), and splits that .* their classes: choose another out"
    with pytest.raises(ShardError, match=message):
        packed(images, tmp_path)


def test_splits_packed_at_the_same_time(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pack adds its split while this one writes shards."""
    others = tmp_path / "others"
    (others / "owl").mkdir(parents=True)
    (others / "owl" / "1.jpg").write_bytes(jpeg(8, 8))
    written = pack_file.run_tasks

    def meanwhile(split: str, src: Path) -> Any:
        def run_tasks(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(pack_file, "run_tasks", written)
            pack(PackOptions(src, tmp_path / "out", split=split))
            return written(*args, **kwargs)

        return run_tasks

    monkeypatch.setattr(pack_file, "run_tasks", meanwhile("val", images))
    packed(images, tmp_path / "out")
    assert sorted(read_index(str(tmp_path / "out")).splits) == ["train", "val"]
    monkeypatch.setattr(pack_file, "run_tasks", meanwhile("more", images))
    pack(PackOptions(others, tmp_path / "out", split="other"))
    assert sorted(read_index(str(tmp_path / "out")).splits) == ["more", "other", "train", "val"]
    # Without an index each would count classes of its own.
    (tmp_path / "out" / "index.json").unlink()
    monkeypatch.setattr(pack_file, "run_tasks", meanwhile("first", images))
    with pytest.raises(
        ShardError, match="has got other classes since this pack began: remove the shards of split 'sec"
    ):
        pack(PackOptions(others, tmp_path / "out", split="second"))


def test_a_split_whose_name_begins_like_another(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path, split="train-extra")
    (tmp_path / ".train-extra-000001.tar.part").touch()
    packed(images, tmp_path)
    assert sorted(read_index(str(tmp_path)).splits) == ["train", "train-extra"]
    assert (tmp_path / ".train-extra-000001.tar.part").exists()


KILLED = """
import sys
from pathlib import Path
from lightning_fourmin.data.pack.pack import PackOptions, pack
pack(PackOptions(Path(sys.argv[1]), Path(sys.argv[2]), shard_count=40, resize=24, num_workers=2))
"""


def children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()] if listing.exists() else []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_killed_it_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    (src / "a").mkdir(parents=True)
    data = jpeg(700, 700)
    for number in range(200):
        (src / "a" / f"{number}.jpg").write_bytes(data + bytes([number]))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(src), str(out)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(list(out.glob(".pack-train/*.json"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        workers = children(process.pid)
        assert workers
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    written = {path.stem: path.read_text() for path in out.glob(".pack-train/*.json")}
    before = {number: (out / f"train-{number}.tar").stat().st_mtime_ns for number in written}
    assert not (out / "index.json").exists()
    assert 3 <= len(written) < 40
    options = {"shard_count": 40, "resize": 24}
    command = ["-m", "lightning_fourmin", "pack", f"src={src}", f"out={out}", "shard_count=40", "resize=24"]
    with running(command, tmp_path) as run:
        run.wait_until(lambda: len(list(out.glob(".pack-train/*.json"))) > len(written))
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(30) == 130, run.output
        assert run.left() == []
        assert "Traceback" not in run.output
    files = packed(src, out, **options)
    assert {number: (out / f"train-{number}.tar").stat().st_mtime_ns for number in written} == before
    assert files == packed(src, tmp_path / "at once", **options)


def test_unfinished_shards_of_other_options_are_written_again(images: Path, tmp_path: Path) -> None:
    bad = images / "cat" / "bad.jpg"
    bad.write_bytes(b"\xff\xd8 damaged")
    try:
        with pytest.raises(ShardError, match=r"1 images cannot be read.*\n.*cat/bad.jpg"):
            packed(images, tmp_path / "out")
    finally:
        bad.unlink()
    assert not (tmp_path / "out" / "index.json").exists()
    (tmp_path / "out" / ".train-000099.tar.part").touch()
    assert packed(images, tmp_path / "out") == packed(images, tmp_path / "other")


def test_an_entry_that_a_power_cut_left_empty_is_written_again(images: Path, tmp_path: Path) -> None:
    expected = packed(images, tmp_path / "other")
    bad = images / "cat" / "bad.jpg"
    bad.write_bytes(b"\xff\xd8 damaged")
    try:
        with pytest.raises(ShardError):
            packed(images, tmp_path / "out", shard_count=2)
        entries = list((tmp_path / "out" / ".pack-train").glob("*.json"))
        for entry in entries:
            entry.write_text("")
        with pytest.raises(ShardError, match="1 images cannot be read"):
            packed(images, tmp_path / "out", shard_count=2)
    finally:
        bad.unlink()
    assert entries
    for shard in (tmp_path / "out").glob("*.tar"):
        shard.unlink()
    assert packed(images, tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"src": Path("nowhere")}, "src=nowhere is not a folder"),
        ({"split": "a/b"}, "split='a/b' is part of file names"),
        ({"shard_mb": 0}, "shard_mb=0 must be at least 1e-06"),
        ({"quality": 101}, "quality=101 must be at least 1 and at most 100"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"shard_count": 99}, "shard_count=99 is more than the 43 images"),
    ],
)
def test_options_that_make_no_sense(images: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        packed(images, tmp_path, **options)


def test_nothing_is_overwritten(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path)
    with pytest.raises(ShardError, match="has a split 'train' already"):
        packed(images, tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(ShardError, match=r"train-000000.tar is there, but no index has it"):
        packed(images, tmp_path)


def test_no_images(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="has no images: it must hold one folder a class"):
        pack(PackOptions(tmp_path, tmp_path.parent / "out"))


def test_shards_do_not_become_a_class(images: Path) -> None:
    with pytest.raises(ShardError, match=rf"out={images}/shards is or lies in src={images}, where folders are classes"):
        packed(images, images / "shards")


def test_a_folder_above_the_classes(images: Path, tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    (above / "train").symlink_to(images)
    message = f"no folder has images of its own, .* as train/cat/.*: pack a folder below, such as src={above}/train$"
    with pytest.raises(ShardError, match=message):
        pack(PackOptions(above, tmp_path / "out"))


def test_links_are_followed_and_hidden_names_left_out(tmp_path: Path) -> None:
    src, elsewhere = tmp_path / "src", tmp_path / "elsewhere"
    write_ppm(src / "a" / "1.ppm", 1)
    write_ppm(elsewhere / "below" / "2.ppm", 2)
    (src / "a" / "more").symlink_to(elsewhere)
    (src / "a" / "again.ppm").symlink_to(elsewhere / "below" / "2.ppm")
    (src / "b").symlink_to(elsewhere / "below")
    for hidden in (".git/3.ppm", "a/.ipynb_checkpoints/1-checkpoint.ppm", "a/more/below/._2.ppm"):
        write_ppm(src / hidden, 3)
    (src / "a" / ".lock.ppm").symlink_to("nobody@host:1")
    packed(src, tmp_path / "out", shard_count=1)
    found = sorted((sample["cls"], sample["ppm"][-1]) for sample in samples(tmp_path / "out"))
    assert found == [(b"0", 1), (b"0", 2), (b"0", 2), (b"1", 2)]


@pytest.mark.parametrize("target", [".", "..", "../..", "../b"])
def test_links_that_lead_back(tmp_path: Path, target: str) -> None:
    src = tmp_path / "src"
    write_ppm(src / "a" / "1.ppm")
    write_ppm(src / "b" / "2.ppm")
    (src / "a" / "loop").symlink_to(target)
    (src / "b" / "back").symlink_to("../a")
    link = src / "a" / ("loop/back" if target == "../b" else "loop")
    with pytest.raises(ShardError, match=f"^{link} is a link to {link.resolve()}, a folder that it lies in: remove it"):
        packed(src, tmp_path / "out")


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    src = tmp_path / "src"
    write_ppm(src / "a" / "1.ppm")
    (src / "a" / "2.ppm").symlink_to("gone.ppm")
    (src / "a" / "3.ppm").symlink_to("3.ppm")
    (src / "a" / "more").symlink_to("/gone/more")
    with pytest.raises(ShardError, match=r"^3 images cannot be read; repair or remove them") as caught:
        packed(src, tmp_path / "out", shard_count=1)
    lines = str(caught.value).splitlines()[1:]
    for line, link in zip(
        lines, ("2.ppm (a link to gone.ppm)", "3.ppm (a", "more (a link to /gone/more)"), strict=True
    ):
        assert line.startswith(f"  {src}/a/{link}")
    (src / "b").symlink_to("/gone/b")
    with pytest.raises(ShardError, match=f"^{src}/b is a link that leads nowhere, perhaps to a class: repair or"):
        packed(src, tmp_path / "out")


def test_classes_without_images_keep_their_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    write_ppm(src / "b" / "1.ppm")
    write_ppm(src / "d" / "2.ppm")
    for empty in ("a", "c"):
        (src / empty).mkdir()
    packed(src, out, shard_count=1)
    assert caplog.messages == [f"src={src} has no images of 2 of the 4 classes, which keep their labels: a, c"]
    assert read_index(str(out)).classes == ("a", "b", "c", "d")
    assert sorted(sample["cls"] for sample in samples(out)) == [b"1", b"3"]
    caplog.clear()
    shutil.rmtree(src / "d")
    packed(src, out, shard_count=1, split="val")
    assert caplog.messages == [f"src={src} has no images of 3 of the 4 classes, which keep their labels: a, c, d"]


@contextmanager
def no_rights() -> Iterator[None]:
    """As a user for whom folders can be closed, which they are not for root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_folders_that_may_not_be_read(images: Path) -> None:
    # Not tmp_path, which lies in a folder of its user only.
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(images, src)
        closed = src / "cat" / "more"
        Path(folder).chmod(0o755)
        src.chmod(0o755)
        closed.chmod(0)
        try:
            with no_rights(), pytest.raises(PermissionError, match=str(closed)):
                packed(src, Path(folder) / "out")
        finally:
            closed.chmod(0o755)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "src" / "cat").mkdir(parents=True)
    (tmp_path / "src" / "cat" / "1.png").write_bytes(b"")
    (tmp_path / "src" / "cat" / "2.png").write_bytes(b"words")
    with pytest.raises(ShardError) as caught:
        pack(PackOptions(tmp_path / "src", tmp_path / "out", num_workers=1))
    message = str(caught.value)
    assert f"{tmp_path}/src/cat/1.png: it is empty" in message
    assert f"{tmp_path}/src/cat/2.png: its bytes are not those of an image in a known format" in message


def test_out_is_refused_before_any_image_is_read(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"is or lies in src=.*, where folders are classes: choose another out"):
        PackOptions(images, images)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        pack(PackOptions(images, tmp_path / "file" / "out"))
