"""Files that are complete or not there at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text)
    partial.replace(path)
