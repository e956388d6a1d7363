"""The cursor reads what tarfile reads, whatever made the tar; odd and hostile members do no harm."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander
from webdataset.writer import TarWriter

from lightning_fourmin.data.tar import TarCursor
from lightning_fourmin.errors import ShardError

KEYS = ("a", "b/c", "\u00e9", "folder.with.dots/d", "long/" * 30 + "e", "f" * 120, "g")


def fill(tar: tarfile.TarFile, **attributes: Any) -> None:
    """Files of all sizes, among them ones that do not belong to samples."""
    folder = tarfile.TarInfo("folder.d")
    folder.type = tarfile.DIRTYPE
    tar.addfile(folder)
    for number, key in enumerate(KEYS):
        for field in ("txt", "Cls.x", "bin"):
            info = tarfile.TarInfo(f"{key}.{field}")
            data = f"{key} {field}".encode() * (100 * number) if field == "bin" else field.encode()
            info.size = len(data)
            for name, value in attributes.items():
                setattr(info, name, value)
            tar.addfile(info, io.BytesIO(data))
    for name in ("nokey", "__meta__/x.txt", ".hidden"):
        tar.addfile(tarfile.TarInfo(name))


def by_tarfile(form: int, **attributes: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        fill(tar, **attributes)
    return file.getvalue()


def by_webdataset() -> bytes:
    """With modification times, which take a pax header each."""
    file = io.BytesIO()
    writer = TarWriter(file)
    for number in range(3):
        writer.write({"__key__": f"{number}", "cls": number, "bin": b"abc" * 300 * number})
    writer.close()
    return file.getvalue()


def global_header() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as tar:
        fill(tar)
    return file.getvalue()


MAKERS: dict[str, Callable[[], bytes]] = {
    "gnu": lambda: by_tarfile(tarfile.GNU_FORMAT),
    "pax": lambda: by_tarfile(tarfile.PAX_FORMAT),
    "pax with times": lambda: by_tarfile(tarfile.PAX_FORMAT, mtime=1.5),
    "pax with a negative time": lambda: by_tarfile(tarfile.PAX_FORMAT, mtime=-1.5),
    "pax with owners": lambda: by_tarfile(tarfile.PAX_FORMAT, uname="\u00e9"),
    "old type of files": lambda: by_tarfile(tarfile.GNU_FORMAT, type=tarfile.AREGTYPE),
    "global header": global_header,
    "webdataset": by_webdataset,
    "nothing": lambda: bytes(10240),
}


def found(content: bytes, seeks: bool) -> list[tuple[str, dict[str, bytes]]]:
    cursor = TarCursor(io.BytesIO(content), "train-0.tar", seeks=seeks)
    samples = []
    for sample in cursor.samples():
        assert not isinstance(sample, ShardError), sample
        for member in sample.members.values():
            # Where the member says it starts, tarfile finds it.
            with tarfile.open(fileobj=io.BytesIO(content[member.offset :])) as tar:
                assert tar.getmembers()[0].name == member.name
        samples.append((sample.key, {field: member.data for field, member in sample.members.items()}))
    return samples


@pytest.mark.parametrize("seeks", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_samples_are_those_that_webdataset_reads(make: Callable[[], bytes], seeks: bool) -> None:
    content = make()
    expected = [
        (sample["__key__"], {field: data for field, data in sample.items() if not field.startswith("__")})
        for sample in group_by_keys(tar_file_expander([{"url": "", "stream": io.BytesIO(content)}]))
    ]
    assert found(content, seeks) == expected


def test_passing_over_samples_changes_nothing() -> None:
    content = by_webdataset()
    cursor = TarCursor(io.BytesIO(content), "train-0.tar", seeks=True)
    assert cursor.read(2, 7).key == "2"
    with pytest.raises(ShardError, match=r"train-0.tar ends after 3 samples, at offset \d+, but the index has more"):
        cursor.read(3, 8)


def member(name: str, size: int, data: bytes = b"", kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + data.ljust(-(-len(data) // 512) * 512, b"\0")


HOSTILE = {
    "larger than the tar": (member("a.bin", 1 << 60), "member a.bin at offset 512 cannot be read: unexpected end"),
    "goes backwards": (member("a.bin", -2048), "the member at offset 512 cannot be read: its size is negative"),
    "sparse": (
        member("a.bin", 0, kind=tarfile.GNUTYPE_SPARSE),
        "the member at offset 512 cannot be read: it is a sparse file",
    ),
    "endless long names": (
        member("x", 512, b"y" * 512, tarfile.GNUTYPE_LONGNAME) * 2000,
        "the member at offset 512 cannot be read: ",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_members_are_errors(content: bytes, message: str) -> None:
    content = member("first.bin", 0) + content + bytes(1024)
    first, *others = TarCursor(io.BytesIO(content), "train-0.tar", seeks=True).samples()
    assert first.key == "first"
    assert others
    assert all(str(error).startswith(f"train-0.tar: {message}") for error in others), others


def test_nothing_is_written_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("../up.txt", str(tmp_path / "absolute.txt")):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"link{kind.decode()}.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    samples = found(file.getvalue(), seeks=True)
    assert [fields for _, fields in samples] == [{"txt": b"abc"}] * 2
    assert list(tmp_path.rglob("*")) == [inner]
