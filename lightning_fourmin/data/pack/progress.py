"""Remembers which shards of an unfinished pack are written, so that it can go on after it was killed."""

import hashlib
import json
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_fourmin.data.index import ImageSizes, Shard, parse_sizes
from lightning_fourmin.errors import ShardError
from lightning_fourmin.files import write_whole


@dataclass(frozen=True)
class Written:
    """A shard that is complete."""

    shard: Shard
    sizes: ImageSizes | None


class Journal:
    """A hidden folder beside the shards, with a file for each that is written."""

    def __init__(self, out: Path, split: str, content: str) -> None:
        self._out = out
        self._split = split
        self._folder = out / f".pack-{split}"
        self._fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def read(self) -> dict[int, Written]:
        """The shards that need not be written again; none if their content would differ now."""
        plan = self._folder / "plan"
        entries = {}
        for path in self._folder.glob("*.json"):
            with suppress(ValueError):  # cut short by a power failure: that shard is written again
                entries[int(path.stem)] = json.loads(path.read_text())
        if not plan.exists() or plan.read_text() != self._fingerprint:
            for entry in entries.values():
                (self._out / entry["shard"]["name"]).unlink(missing_ok=True)
            self.remove()
            if strangers := sorted(self._shards("{}.tar")):
                raise ShardError(
                    f"{strangers[0]} is there, but no index has it: remove the shards of split {self._split!r}, or "
                    f"index them with `fourmin verify path={self._out} index=true`"
                )
            write_whole(plan, self._fingerprint)
            return {}
        return {
            number: Written(Shard(**entry["shard"]), parse_sizes(entry["sizes"]))
            for number, entry in entries.items()
            if (path := self._out / entry["shard"]["name"]).exists()
            and path.stat().st_size == entry["shard"]["num_bytes"]
        }

    def add(self, number: int, written: Written) -> None:
        write_whole(self._folder / f"{number:06d}.json", json.dumps(asdict(written)))

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for partial in self._shards(".{}.tar.part"):
            partial.unlink()

    def _shards(self, form: str) -> list[Path]:
        """Files of the split's shards; those of `train-extra` are not those of `train`."""
        name = re.compile(re.escape(form).replace(r"\{\}", rf"{re.escape(self._split)}-\d+"))
        return [path for path in self._out.glob("*") if name.fullmatch(path.name)]
