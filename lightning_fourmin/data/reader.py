"""The stream of samples that a worker reads: shards from end to end, shuffled on the way."""

import os
from collections.abc import Generator
from contextlib import closing
from itertools import islice, tee
from operator import attrgetter

from lightning_fourmin.data.index import Split
from lightning_fourmin.data.order import Line, Place, Stretches, cut, num_positions
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.data.tar import TarCursor
from lightning_fourmin.data.urls import is_url, joined_location, open_source
from lightning_fourmin.errors import ShardError

Samples = Generator[Sample | ShardError, None, None]


def stream_lane(split: Split, folder: str, line: Line, lane: Stretches, first: int) -> Samples:
    """The samples of a lane from its `first` on, in the order of the line; what cannot be read comes as the error.

    Shards are read from end to end, ahead of the line by a window: for each sample that is handed out another is read.
    """
    rest = cut(lane, [first, num_positions(lane) - first])[1]
    with closing(_OpenShard(split, folder)) as shards:
        windows, ahead = tee(map(line.places, line.by_window(rest)))
        reads = (
            ((number, place.turn), shards.read(place))
            for number, places in enumerate(ahead)
            for place in sorted(places, key=attrgetter("turn"))
        )
        held: dict[tuple[int, int], Sample | ShardError] = {}
        for number, places in enumerate(windows):
            for place in places:
                while (number, place.turn) not in held:
                    held.update([next(reads)])
                sample = held.pop((number, place.turn))
                held.update(islice(reads, 1))
                yield sample


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
        except (OSError, ValueError) as error:
            return ShardError(f"{shard.name} cannot be opened: {error}")
        except ShardError as error:
            return error
