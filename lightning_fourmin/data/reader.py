"""Reads samples out of shards: a cursor that goes through one tar file, and the stream of samples of a lane."""

import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing, suppress
from operator import attrgetter
from typing import IO

from webdataset.tariterators import base_plus_ext

from lightning_fourmin.data.index import Split
from lightning_fourmin.data.order import Line, Place, Stretches, cut, num_positions
from lightning_fourmin.data.sample import Member, Sample, ShardError
from lightning_fourmin.data.sources import is_url, joined_location, open_source


class TarCursor:
    """Goes through the samples of one shard, forwards only; a sample that is passed over costs its headers."""

    def __init__(self, file: IO[bytes], name: str, *, seeks: bool) -> None:
        self._name = name
        self.position = 0
        """Samples passed."""
        self._file = file
        self._seeks = seeks
        self._failure: ShardError | None = None
        try:
            # A stream cannot seek: there tarfile reads what is passed over.
            self._tar = tarfile.open(fileobj=file, mode="r:" if seeks else "r|")  # noqa: SIM115
        except (tarfile.TarError, OSError) as error:
            self.close()
            raise ShardError(f"{name} is not a tar file: {error}") from error
        self._next = self._advance()

    @property
    def offset(self) -> int:
        """Bytes of the shard that were understood."""
        return self._tar.offset

    def close(self) -> None:
        # A program behind a pipe may complain that nobody wants the rest.
        with suppress(OSError):
            self._file.close()

    def read(self, position: int, number: int) -> Sample:
        """The sample at a position that is not passed yet; `number` is its identity."""
        while self._next is not None:
            key, wanted = _key(self._next), self.position == position
            members: dict[str, Member] = {}
            twice: tarfile.TarInfo | None = None
            while self._next is not None and _key(self._next) == key:
                if wanted:
                    field = str(base_plus_ext(self._next.name)[1]).lower()
                    twice = self._next if field in members else twice
                    members[field] = Member(self._next.name, self._next.offset, self._data(self._next))
                self._next = self._advance()
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

    def _data(self, info: tarfile.TarInfo) -> bytes:
        try:
            if self._seeks:
                # Twice as fast as the file object that tarfile makes for it.
                self._file.seek(info.offset_data)
                data = self._file.read(info.size)
            else:
                file = self._tar.extractfile(info)
                assert file is not None
                data = file.read()
            if len(data) < info.size:
                raise tarfile.ReadError("unexpected end of data")
            return data
        except (tarfile.TarError, OSError) as error:
            raise self._damage(f"member {info.name} at offset {info.offset}", error) from error

    def _advance(self) -> tarfile.TarInfo | None:
        """The next member that belongs to a sample."""
        try:
            while (info := self._tar.next()) is not None:
                # tarfile keeps every member it has seen.
                self._tar.members.clear()  # type: ignore[attr-defined]
                if info.isreg() and _key(info) and not re.match(r"__[^/]*__($|/)", info.name):
                    return info
        except (tarfile.TarError, OSError) as error:
            # The sample before is whole: the damage is that of the next one.
            self._damage(f"the member at offset {self.offset}", error)
        return None

    def _damage(self, where: str, error: Exception) -> ShardError:
        """What every later read raises, too."""
        self._next = None
        self._failure = ShardError(f"{self._name}: {where} cannot be read: {error}")
        return self._failure


def _key(info: tarfile.TarInfo) -> str:
    return base_plus_ext(info.name)[0] or ""


def stream_lane(split: Split, folder: str, line: Line, lane: Stretches, first: int) -> Iterator[Sample | ShardError]:
    """The samples of a lane from its `first` on, in the order of the line; what cannot be read comes as the error.

    Each window is read in the order of the shards, and held until its last sample has been asked for.
    """
    with closing(_OpenShard(split, folder)) as reader:
        for stretch in line.by_window(cut(lane, [first, num_positions(lane) - first])[1]):
            places = line.places(stretch)
            held = {place.turn: reader.read(place) for place in sorted(places, key=attrgetter("turn"))}
            for place in places:
                yield held.pop(place.turn)


class _OpenShard:
    """Reads samples at places that mostly follow each other; one shard is open at a time."""

    def __init__(self, split: Split, folder: str) -> None:
        self._split = split
        self._folder = folder
        self._shard = -1
        self._cursor: TarCursor | ShardError | None = None

    def close(self) -> None:
        if isinstance(self._cursor, TarCursor):
            self._cursor.close()

    def read(self, place: Place) -> Sample | ShardError:
        cursor = self._cursor
        if self._shard != place.shard or (isinstance(cursor, TarCursor) and cursor.position > place.position):
            self.close()
            self._shard = place.shard
            cursor = self._cursor = self._open(place.shard)
        if not isinstance(cursor, TarCursor):
            assert cursor is not None
            return cursor
        try:
            return cursor.read(place.position, place.number)
        except ShardError as error:
            return error

    def _open(self, number: int) -> TarCursor | ShardError:
        shard = self._split.shards[number]
        location = joined_location(self._folder, shard.name)
        try:
            if not is_url(location) and (num_bytes := os.path.getsize(location)) != shard.num_bytes:
                return ShardError(
                    f"{shard.name} has {num_bytes} bytes, but the index says {shard.num_bytes}: the shard is truncated "
                    "or the index is not its own; check with `fourmin verify`"
                )
            return TarCursor(open_source(location), shard.name, seeks=not is_url(location))
        except OSError as error:
            return ShardError(f"{shard.name} cannot be opened: {error}")
        except ShardError as error:
            return error
