"""Where shards lie: local files, and URLs that webdataset's openers read."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast

from lightning_fourmin.errors import ShardError


def is_url(location: str) -> bool:
    """Whether a location is a URL, such as http://, https://, gs:// or pipe:, rather than a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://|pipe:", location) is not None


def joined_location(folder: str, name: str) -> str:
    """The location of a file in a folder or under a URL; a name that is a URL stands for itself."""
    if is_url(name):
        return name
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def refuse_pipes(locations: Iterable[str]) -> None:
    """Raises `ShardError` if a location is a `pipe:` URL, which is a shell command."""
    for location in locations:
        if location.startswith("pipe:"):
            raise ShardError(f"{location!r} would run a command: set pipes=true if you trust who wrote it")


def open_source(location: str) -> IO[bytes]:
    """Opens a location for reading; only the stream of a local file can seek. Raises `OSError` if that fails."""
    try:
        if not is_url(location):
            return open(location, "rb")
        # It takes a while to import, and only URLs need it.
        from webdataset.gopen import gopen

        return cast(IO[bytes], gopen(location, "rb"))
    except ValueError as error:
        # A URL of a kind that webdataset does not know, or a name that no file can have.
        raise OSError(str(error)) from error
