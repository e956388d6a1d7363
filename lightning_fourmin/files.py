"""Writing files that are complete or not there at all, files in memory, and the folder that the package caches in."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside the target and renames it, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def file_in_memory(name: str) -> int | None:
    """Returns the descriptor of a file in memory, which lasts while it is open anywhere; None if that is impossible."""
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError):  # not on this system, or not allowed
        return None


def cache_folder() -> Path:
    """Returns the folder in which the package keeps files of its own between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fourmin"
