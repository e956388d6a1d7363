"""Files that are complete or not there at all, or in memory only, and the folder for those that the package keeps."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def file_in_memory(name: str) -> int | None:
    """The descriptor of a file without a path, which goes with its last user; None where there is no such thing."""
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError):  # not on this system, or not allowed
        return None


def cache_folder() -> Path:
    """Where the package keeps files of its own between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fourmin"
