"""Writing files that are complete or not there at all, files in memory, and the folder that the package caches in."""

import os
import tempfile
from pathlib import Path


def check_writable(folder: Path) -> None:
    """Raises OSError if files cannot be written into a folder, or the folder cannot be made, before long work begins.

    It makes nothing: work that fails for another reason leaves no empty folder.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        # Not the name of the file that was tried.
        raise type(error)(error.errno, error.strerror, str(there)) from None


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
