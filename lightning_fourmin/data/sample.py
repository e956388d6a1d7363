"""`Sample`: the files of one sample as bytes, with readers for the usual kinds of fields."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fourmin.errors import ShardError


@dataclass(frozen=True)
class Member:
    """One file of a sample."""

    name: str
    offset: int
    """Where its header starts in the shard, in bytes."""
    data: bytes


@dataclass(frozen=True)
class Sample:
    """The files of a shard that share a key: what a transform is called with.

    `sample["jpg"]` is the bytes of the file with that extension, in lower case. The readers raise a `ShardError` that
    names shard, member and offset, if the field is missing or damaged.
    """

    shard: str
    """Name of the tar file."""
    key: str
    """What the names of its files have in common: the part before the first dot."""
    number: int
    """The number of samples before it in its split, which identifies it."""
    members: dict[str, Member]
    """The files by their extension."""

    def __contains__(self, field: str) -> bool:
        return field in self.members

    def __getitem__(self, field: str) -> bytes:
        return self._member(field).data

    def text(self, field: str = "txt") -> str:
        """A field of UTF-8 text."""
        return str(self._read(field, "UTF-8 text", bytes.decode))

    def json(self, field: str = "json") -> Any:
        """A field of JSON, parsed."""
        return self._read(field, "JSON", json.loads)

    def integer(self, field: str = "cls") -> int:
        """A field that holds a whole number in digits."""
        return int(self._read(field, "an integer", int))

    def numpy(self, field: str = "npy") -> NDArray[Any]:
        """A field of a saved array, loaded without pickle."""
        return np.asarray(
            self._read(field, "a NumPy array", lambda data: np.load(io.BytesIO(data), allow_pickle=False))
        )

    def label(self, num_classes: int) -> int:
        """The integer in field cls, which must be below `num_classes`, unless that is 0."""
        label = self.integer()
        if num_classes and not 0 <= label < num_classes:
            raise self.fault("cls", f"has class {label}, but the index has classes 0 to {num_classes - 1}")
        return label

    def fault(self, field: str, what: str) -> ShardError:
        """An error that says what is wrong with a field, and where that lies."""
        member = self._member(field)
        return ShardError(f"{self.shard}: member {member.name} at offset {member.offset} {what}")

    @property
    def place(self) -> str:
        """Where the sample lies, for messages."""
        return f"{self.shard}: sample {self.key} at offset {next(iter(self.members.values())).offset}"

    def _member(self, field: str) -> Member:
        if field not in self.members:
            raise ShardError(f"{self.place} has no field {field} (it has {', '.join(self.members)})")
        return self.members[field]

    def _read(self, field: str, kind: str, reader: Callable[[bytes], Any]) -> Any:
        try:
            return reader(self[field])
        except (ValueError, EOFError) as error:
            raise self.fault(field, f"is not {kind}: {error}") from error
