"""Writes one shard: the same bytes for the same samples, complete or not there at all."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from webdataset.writer import TarWriter

from lightning_fourmin.data.index import Shard


class _Hashing:
    """A file that knows how much was written and the checksum of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.num_bytes += len(data)
        self.sha256.update(data)
        return self._file.write(data)


def write_shard(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> Shard:
    """Writes samples, each a key and its fields, in webdataset's format."""
    partial = path.with_name(f".{path.name}.part")
    num_samples = 0
    with partial.open("wb") as file:
        hashing = _Hashing(file)
        writer = TarWriter(hashing, encoder=False, mtime=0)
        for key, fields in samples:
            writer.write({"__key__": key, **fields})
            num_samples += 1
        writer.close()
    partial.replace(path)
    return Shard(path.name, num_samples, hashing.num_bytes, hashing.sha256.hexdigest())
