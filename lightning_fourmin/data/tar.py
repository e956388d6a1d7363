"""A cursor that goes through the samples of one tar file; ordinary headers are read here, all others by tarfile."""

import os
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, NamedTuple, cast

from webdataset.tariterators import base_plus_ext

from lightning_fourmin.data.sample import Member, Sample
from lightning_fourmin.errors import ShardError

# Times in fractions of a second, which webdataset's writer adds to every member.
_ONLY_TIMES = re.compile(rb"(\d+ [acm]time=[-\d.]+\n)+\0*")


class _Entry(NamedTuple):
    """A file in the tar that belongs to a sample."""

    key: str
    field: str
    name: str
    offset: int
    """Where its header starts, in bytes."""
    data_offset: int
    num_bytes: int


class TarCursor:
    """Goes through the samples of one shard, forwards only; a sample that is passed over costs its headers."""

    def __init__(self, file: IO[bytes], name: str, *, seeks: bool) -> None:
        self._name = name
        self.position = 0
        """Samples passed."""
        self.offset = 0
        """Bytes of the shard that were understood."""
        self._file = file
        self._content = file
        """What members are read from: for a stream, tarfile's view of it, which reads what is passed over."""
        self._tar: tarfile.TarFile | None = None
        """Reads the headers, if it has to."""
        self._failure: ShardError | None = None
        """What every later read raises."""
        try:
            if seeks:
                self._num_bytes = file.seek(0, os.SEEK_END)
            else:
                self._num_bytes = sys.maxsize
                self._tar = tarfile.open(fileobj=file, mode="r|")  # noqa: SIM115
                self._content = cast(IO[bytes], self._tar.fileobj)
            self._next = self._find()
        except Exception as error:
            self.close()
            raise ShardError(f"{name} is not a readable tar file: {error}") from error

    def close(self) -> None:
        # A program behind a pipe may complain that nobody wants the rest.
        with suppress(OSError):
            self._file.close()

    def read(self, position: int, number: int) -> Sample:
        """The sample at a position that is not passed yet; `number` is its identity."""
        while self._next is not None:
            key, wanted = self._next.key, self.position == position
            members: dict[str, Member] = {}
            twice: _Entry | None = None
            while (entry := self._next) is not None and entry.key == key:
                if wanted:
                    twice = entry if entry.field in members else twice
                    members[entry.field] = Member(entry.name, entry.offset, self._data(entry))
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
        """All samples that are left; what cannot be read comes as the error."""
        while self._next is not None or self._failure is not None:
            try:
                yield self.read(self.position, self.position)
            except ShardError as error:
                self._failure = None
                yield error

    def _data(self, entry: _Entry) -> bytes:
        try:
            if entry.data_offset + entry.num_bytes > self._num_bytes:
                raise tarfile.ReadError("unexpected end of data")
            self._content.seek(entry.data_offset)
            data = self._content.read(entry.num_bytes)
            if len(data) < entry.num_bytes:
                raise tarfile.ReadError("unexpected end of data")
            return data
        except Exception as error:
            raise self._damage(f"member {entry.name} at offset {entry.offset}", error) from error

    def _advance(self) -> None:
        try:
            self._next = self._find()
        except Exception as error:
            # The sample before is whole: the damage is that of the next one.
            self._damage(f"the member at offset {self.offset}", error)

    def _damage(self, where: str, error: Exception) -> ShardError:
        self._next = None
        self._failure = ShardError(f"{self._name}: {where} cannot be read: {error}")
        return self._failure

    # Damaged bytes make tarfile raise errors of many kinds, hence `except Exception` above.
    def _find(self) -> _Entry | None:
        """The next member that belongs to a sample."""
        while (info := self._header()) is not None:
            key, field = base_plus_ext(info.name)
            if info.isreg() and key and not re.match(r"__[^/]*__($|/)", info.name):
                if info.issparse():
                    self.offset = info.offset
                    raise tarfile.ReadError("it is a sparse file")
                return _Entry(key, field.lower(), info.name, info.offset, info.offset_data, info.size)
        return None

    def _header(self) -> tarfile.TarInfo | None:
        """The next member of any kind."""
        if self._tar is None:
            if self.offset > self._num_bytes:
                raise tarfile.ReadError("unexpected end of data")
            if (info := self._plain_header()) is not None:
                return info
            # From here on tarfile goes ahead: one odd member is followed by others.
            self._file.seek(self.offset)
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115
        info = self._tar.next()
        # tarfile keeps every member it has seen.
        self._tar.members.clear()  # type: ignore[attr-defined]
        if info is not None and self._tar.offset <= self.offset:
            raise tarfile.ReadError("its size is negative")
        self.offset = self._tar.offset
        return info

    def _plain_header(self) -> tarfile.TarInfo | None:
        """The next member, if there is nothing to its header that only tarfile understands."""
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
    """Of a header that is whole and plain: a short ASCII name, a size in octal digits."""
    try:
        name = block[:100].partition(b"\0")[0].decode("ascii")
        num_bytes, checksum = int(block[124:136].rstrip(b"\0 "), 8), int(block[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    whole = len(block) == tarfile.BLOCKSIZE and sum(block) - sum(block[148:156]) + 8 * ord(" ") == checksum
    has_prefix = block[345:346] != b"\0"
    return (name, num_bytes) if whole and num_bytes >= 0 and block[257:262] == b"ustar" and not has_prefix else None
