"""The stream of samples that a worker reads: shards from end to end, shuffled on the way."""

import os
from collections.abc import Generator
from contextlib import closing
from itertools import islice, tee
from operator import attrgetter

from lightning_fourmin.data.index import Split
from lightning_fourmin.data.order import EpochOrder, Place, Spans, cut, num_positions
from lightning_fourmin.data.sample import Sample
from lightning_fourmin.data.tar import TarCursor
from lightning_fourmin.data.urls import is_url, joined_location, open_source
from lightning_fourmin.errors import ShardError

Samples = Generator[Sample | ShardError, None, None]
"""Samples in the order that was asked for. What cannot be read comes as the error, in the place of the sample."""


def stream_range(split: Split, folder: str, order: EpochOrder, worker_range: Spans, first: int) -> Samples:
    """The samples of a worker range from position `first` of it on, in the epoch's order.

    Shards are read from end to end while samples are handed out shuffled, so samples are held from their reading until
    their turn. At the start of the stream up to a window of them is read; from then on one more is read for each that
    is handed out, which spreads the reading evenly over the batches. At most about one window is held, undecoded.
    """
    rest = cut(worker_range, [first, num_positions(worker_range) - first])[1]
    with closing(_OpenShard(split, folder)) as shards:
        # The places of each window are needed twice: as they are handed out, and sorted as they are read.
        windows, ahead = tee(map(order.places, order.by_window(rest)))
        # With remainder="wrap" a place may come twice in a range, so the number of the window is part of its key.
        reads = (
            ((number, place.read_order), shards.read(place))
            for number, places in enumerate(ahead)
            for place in sorted(places, key=attrgetter("read_order"))
        )
        held: dict[tuple[int, int], Sample | ShardError] = {}
        for number, places in enumerate(windows):
            for place in places:
                while (number, place.read_order) not in held:
                    held.update([next(reads)])
                sample = held.pop((number, place.read_order))
                held.update(islice(reads, 1))
                yield sample


class _OpenShard:
    """Reads samples at places that mostly follow each other, with one shard open at a time."""

    def __init__(self, split: Split, folder: str) -> None:
        self._split = split
        self._folder = folder
        self._shard = -1
        self._cursor: TarCursor | ShardError = ShardError("no shard is open yet")
        """What reads the open shard, or the error that says why it cannot be opened."""

    def close(self) -> None:
        """Closes the shard that is open."""
        if isinstance(self._cursor, TarCursor):
            self._cursor.close()

    def read(self, place: Place) -> Sample | ShardError:
        """The sample at a place, or the error that says why it cannot be read."""
        cursor = self._cursor
        # A cursor only goes forwards. A place that it has passed is asked for where two spans share a window, or
        # after a wrap: then the shard is opened once more.
        if self._shard != place.shard or (isinstance(cursor, TarCursor) and cursor.position > place.in_shard):
            self.close()
            self._shard = place.shard
            cursor = self._cursor = self._open(place.shard)
        if isinstance(cursor, ShardError):
            return cursor
        try:
            return cursor.read(place.in_shard, place.number)
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
