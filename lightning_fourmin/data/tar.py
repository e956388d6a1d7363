"""One shard, a tar file of samples: the cursor that reads it and the function that writes it.

A sample is a run of files whose names have the same key before the first dot: `000012.jpg`, `000012.cls`. Ordinary
headers are parsed here, several times faster than by the standard library, because a worker that begins in the middle
of a shard has to pass over many. A header that is not quite ordinary is left to `tarfile`, and so is the rest of that
shard.
"""

import hashlib
import os
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

from webdataset.tariterators import base_plus_ext
from webdataset.writer import TarWriter

from lightning_fourmin.data.index import Shard
from lightning_fourmin.data.sample import Member, Sample
from lightning_fourmin.errors import ShardError

# Times in fractions of a second, which webdataset's writer adds to every member.
_ONLY_TIMES = re.compile(rb"(\d+ [acm]time=[-\d.]+\n)+\0*")


class _Entry(NamedTuple):
    """A file in the tar that belongs to a sample."""

    key: str
    field: str
    info: tarfile.TarInfo


class TarCursor:
    """Goes through the samples of one shard, forwards only. Passing over a sample costs the reading of its headers.

    A damaged sample raises an error of its own, and the next call goes on behind it if that is possible. Where the
    structure of the tar itself is damaged, this call and every later one raises the error that says where. Damaged
    bytes make `tarfile` raise errors of many kinds, so this class catches all of them.

    A cursor belongs to the process and thread that made it: a worker of a loader, or of `fourmin verify`.
    """

    def __init__(self, file: IO[bytes], name: str, *, seeks: bool) -> None:
        """Raises `ShardError` if the file does not begin as a tar does.

        Args:
            file: the bytes of the shard, which the cursor closes.
            name: the name of the shard in errors.
            seeks: whether the file can seek, as local ones can. All bytes of another are read in order.
        """
        self._name = name
        self.position = 0
        """The number of samples that were read or passed over."""
        self.offset = 0
        """The number of bytes from the start of the shard that were understood."""
        self._file = file
        self._content = file
        """The file from which members are read: `file` itself; of a stream tarfile's view, which seeks by reading."""
        self._tar: tarfile.TarFile | None = None
        """What reads the headers of a stream, and those of a file from the first one on that is not ordinary."""
        self.links: list[str] = []
        """The links that were passed over: their names and offsets. A sample has regular files only."""
        self._failure: ShardError | None = None
        """What every later read raises."""
        try:
            if seeks:
                self._num_bytes = file.seek(0, os.SEEK_END)
            else:
                self._num_bytes = sys.maxsize
                self._tar = tarfile.open(fileobj=file, mode="r|")  # noqa: SIM115
                self._content = cast(IO[bytes], self._tar.fileobj)
            # The cursor always knows the next file: a sample ends where the next file has another key.
            self._next = self._find()
        except Exception as error:
            self.close()
            raise ShardError(f"{name} is not a readable tar file: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        # Closing a `pipe:` URL before its end may make the program behind it fail.
        with suppress(OSError):
            self._file.close()

    def read(self, position: int, number: int) -> Sample:
        """The sample at a position that was not passed yet, or a `ShardError`; `number` becomes its identity."""
        while self._next is not None:
            key, wanted = self._next.key, self.position == position
            members: dict[str, Member] = {}
            twice: tarfile.TarInfo | None = None
            while (entry := self._next) is not None and entry.key == key:
                if wanted:
                    twice = entry.info if entry.field in members else twice
                    members[entry.field] = Member(entry.info.name, entry.info.offset, self._data(entry.info))
                self._advance()
            self.position += 1
            if twice is not None:
                raise ShardError(f"{self._name}: member {twice.name} at offset {twice.offset} is there twice")
            if wanted:
                return Sample(self._name, key, number, members)
        raise self._failure or ShardError(
            f"{self._name} ends after {self.position} samples, at offset {self.offset}, but the index has more: "
            "the shard is damaged or the index is not its own; check with `fourmin verify`"
        )

    def samples(self) -> Iterator[Sample | ShardError]:
        """All samples that are left. What cannot be read comes as the error."""
        while self._next is not None or self._failure is not None:
            try:
                yield self.read(self.position, self.position)
            except ShardError as error:
                self._failure = None
                yield error

    def _data(self, info: tarfile.TarInfo) -> bytes:
        try:
            # Checked before the reading, for which Python would reserve memory of whatever size the header says.
            if info.offset_data + info.size > self._num_bytes:
                raise tarfile.ReadError("unexpected end of data")
            self._content.seek(info.offset_data)
            data = self._content.read(info.size)
            # A stream has no known length.
            if len(data) < info.size:
                raise tarfile.ReadError("unexpected end of data")
            return data
        except Exception as error:
            raise self._damage(f"member {info.name} at offset {info.offset}", error) from error

    def _advance(self) -> None:
        try:
            self._next = self._find()
        except Exception as error:
            # Not raised here: the sample that ends here is whole, and the damage is in the next one.
            self._damage(f"the member at offset {self.offset}", error)

    def _damage(self, where: str, error: Exception) -> ShardError:
        self._next = None
        self._failure = ShardError(f"{self._name}: {where} cannot be read: {error}")
        return self._failure

    def _find(self) -> _Entry | None:
        """The next member that belongs to a sample; None at the end."""
        while (info := self._header()) is not None:
            key, field = base_plus_ext(info.name)
            if info.issym() or info.islnk():
                self.links.append(f"{info.name} at offset {info.offset}")
            if info.isreg() and key and not re.match(r"__[^/]*__($|/)", info.name):
                if info.issparse():
                    self.offset = info.offset
                    raise tarfile.ReadError("it is a sparse file")
                return _Entry(key, field.lower(), info)
        return None

    def _header(self) -> tarfile.TarInfo | None:
        """The next member of any kind; None at the end."""
        if self._tar is None:
            if self.offset > self._num_bytes:
                raise tarfile.ReadError("unexpected end of data")
            if (info := self._plain_header()) is not None:
                return info
            # From here on tarfile reads: one odd member is followed by others.
            self._file.seek(self.offset)
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115
        info = self._tar.next()
        # tarfile keeps every member it has seen, which in a large shard is a lot.
        self._tar.members.clear()  # type: ignore[attr-defined]
        if info is not None and self._tar.offset <= self.offset:
            raise tarfile.ReadError("its size is negative")
        self.offset = self._tar.offset
        return info

    def _plain_header(self) -> tarfile.TarInfo | None:
        """The next member, or None if something in its header needs tarfile: also at the end of the shard."""
        self._file.seek(self.offset)
        block = self._file.read(tarfile.BLOCKSIZE)
        end = self.offset + tarfile.BLOCKSIZE
        if block[156:157] == tarfile.XHDTYPE:
            extra = _name_and_size(block)
            if extra is None or not 0 < extra[1] <= tarfile.BLOCKSIZE:
                return None
            if not _ONLY_TIMES.fullmatch(self._file.read(tarfile.BLOCKSIZE)):
                return None
            block = self._file.read(tarfile.BLOCKSIZE)
            end += 2 * tarfile.BLOCKSIZE
        if block[156:157] != tarfile.REGTYPE or (found := _name_and_size(block)) is None:
            return None
        info = tarfile.TarInfo(found[0])
        info.offset, info.offset_data, info.size = self.offset, end, found[1]
        self.offset = end + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return info


def _name_and_size(block: bytes) -> tuple[str, int] | None:
    """The name and size in a whole and plain header: a short name in ASCII, a size in octal digits. Else None."""
    try:
        name = block[:100].partition(b"\0")[0].decode("ascii")
        num_bytes, checksum = int(block[124:136].rstrip(b"\0 "), 8), int(block[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    whole = len(block) == tarfile.BLOCKSIZE and sum(block) - sum(block[148:156]) + 8 * ord(" ") == checksum
    has_prefix = block[345:346] != b"\0"
    return (name, num_bytes) if whole and num_bytes >= 0 and block[257:262] == b"ustar" and not has_prefix else None


class _HashingFile:
    """A file to write, which hashes the bytes that it is given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def write_shard(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> Shard:
    """Writes a shard of samples, each a key and its fields, in webdataset's format.

    The same samples give the same bytes. The shard gets its name when it is complete: if the process is killed before,
    it leaves a hidden file that ends in `.part`.
    """
    partial = path.with_name(f".{path.name}.part")
    num_samples = 0
    with partial.open("wb") as file:
        hashing = _HashingFile(file)
        # Without `mtime` each member would have the time of its writing, and the same samples other bytes.
        writer = TarWriter(hashing, encoder=False, mtime=0)
        for key, fields in samples:
            writer.write({"__key__": key, **fields})
            num_samples += 1
        writer.close()
    partial.replace(path)
    return Shard(path.name, num_samples, path.stat().st_size, hashing.sha256.hexdigest())
