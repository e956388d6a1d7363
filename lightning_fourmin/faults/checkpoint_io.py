"""Checkpoint files that are complete or not there at all, and the errors of all ranks when a save or a load fails.

save    the content is made in memory, written beside the target, synced to disk, and renamed to the target
load    the checksums are compared first; then the content is loaded without running code from it
"""

import fcntl
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_fourmin._lightning import WrappingCheckpointIO
from lightning_fourmin.errors import CheckpointError

PART = ".fourmin-part"
"""The end of the name of a file while it is being written."""


class ObjectsError(CheckpointError):
    """A checkpoint with objects whose loading could run code."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves so that a kill, a full disk or a power cut leaves all existing checkpoints as they were.

    Lightning's own TorchCheckpointIO writes the file in the system's temporary directory and moves it. If that is on
    another disk than the target, the move is a copy, which can stop half way. Addresses such as s3:// are left to
    Lightning, since object stores publish whole objects. A local file is read twice: for its checksums and to load it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # In memory first: torch.save hides the reason when a write fails.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        try:
            # Released before an error leaves: Python 3.12.0 and 3.12.1 crash when they collect a view of a BytesIO.
            with content.getbuffer() as view:
                _publish(view, target)
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be saved ({error.strerror}): make room or give a directory that can be written, "
                "then resume; the checkpoints that are there are whole"
            ) from error

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads without running code from the file unless `weights_only=False`; Lightning alone would trust http."""
        refusal = CheckpointError(
            f"{path} is not a whole checkpoint: cut short, damaged, or another kind of file; resume from another"
        )
        file = _local(path)
        if file is not None and not _is_whole(file):
            raise refusal
        try:
            return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)
        except (RuntimeError, pickle.UnpicklingError) as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            if found is None:
                raise refusal from error
            raise ObjectsError(
                f"{path} holds a {found[1]}, and loading that could run code: if you trust the file, pass "
                "weights_only=False to the Trainer's method (weights_only=false to `fourmin train`)"
            ) from None


def default_to_atomic(checkpoint_io: CheckpointIO | None) -> CheckpointIO:
    """Returns what a strategy saves with: `AtomicCheckpointIO`, unless a plugin of the user saves in another way."""
    if checkpoint_io is None:
        return AtomicCheckpointIO()
    if isinstance(checkpoint_io, WrappingCheckpointIO):
        checkpoint_io.checkpoint_io = AtomicCheckpointIO()
    return checkpoint_io


@contextmanager
def share_failure(broadcast: Callable[[str | None], str | None]) -> Iterator[None]:
    """Ends all ranks with the reason of rank 0 if the save inside fails there; otherwise they would wait for rank 0.

    All ranks enter the context together. `broadcast` is a collective that gives the value of rank 0 to all ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    reason = broadcast(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if reason is not None:
        raise CheckpointError(reason)


@contextmanager
def explain_mismatch(path: str | Path | None) -> Iterator[None]:
    """Turns the error of a state dict that does not fit the module into one that names `path` and what differs."""
    try:
        yield
    except RuntimeError as error:
        _, *details = f"{error}\n".splitlines()
        reason = shorten(" ".join(details) or str(error), 200, placeholder=" ...")
        raise CheckpointError(f"{path} was saved by another model: {reason}") from error


def check_checkpoint(path: Path) -> None:
    """Raises CheckpointError unless a Trainer can resume from the file; reads all of it and keeps no tensor."""

    def without_values(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes(), device="meta")

    with suppress(ObjectsError):  # the file is whole; whether it may run code is decided when it is loaded
        refuse_foreign(AtomicCheckpointIO().load_checkpoint(path, without_values), path)


def refuse_foreign(checkpoint: Any, path: str | Path) -> None:
    """Raises CheckpointError for content that no Trainer has saved."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} was not saved by a Trainer: it has no state_dict; resume from another")


def _local(path: str | Path) -> Path | None:
    """Returns the path on this machine, without "file://"; None for an address such as s3://."""
    return Path(url_to_fs(str(path))[1]) if get_protocol(str(path)) == "file" else None


def _is_whole(path: Path) -> bool:
    """Whether the file, if there is one, is an archive with the right checksums; torch.load compares none."""
    if not path.is_file():
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            # torch can be told to write no checksums; then a readable archive directory, the file's end, must do.
            return not torch.serialization.get_crc32_options() or archive.testzip() is None
    except PermissionError:
        raise  # nothing is known about the file
    except (zipfile.BadZipFile, EOFError, OSError):
        return False


def _publish(content: memoryview, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    end = f".{os.getpid()}{PART}"
    # A name that would be too long with its new end is cut off.
    room_bytes = os.pathconf(path.parent, "PC_NAME_MAX") - len(f".{end}")
    partial = path.with_name(f".{os.fsencode(path.name)[:room_bytes].decode(errors='ignore')}{end}")
    try:
        with partial.open("wb", buffering=0) as file:
            with suppress(OSError):  # some network file systems have no locks, and leftovers stay there
                fcntl.flock(file, fcntl.LOCK_EX)
            num_written = 0
            while num_written < len(content):
                num_written += file.write(content[num_written:])
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with suppress(OSError):  # after a success there is nothing to remove
            partial.unlink()
    # Only this puts the new name on disk.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_leftovers(folder: Path) -> None:
    """Removes files that killed processes left unfinished; a living process locks the file that it writes."""
    for leftover in folder.glob(f".*{PART}"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
