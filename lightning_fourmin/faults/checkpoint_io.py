"""Checkpoint files that are whole or not there: written beside the target, synced, renamed; checked when they load."""

import fcntl
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from typing_extensions import override

from lightning_fourmin.errors import CheckpointError

PART = ".fourmin-part"
_OLD_FORMAT = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
"""How files begin that torch saved before 1.6."""


class ObjectsError(CheckpointError):
    """A checkpoint with objects whose loading could run code."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves so that a kill, a full disk or a power cut leaves the checkpoints before it as they were.

    Lightning's own stages the file in the system's temporary directory: on another disk than the target the last step
    is a copy, which can stop half way. Addresses such as s3:// are left to Lightning; object stores publish whole
    objects.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if not _is_local_file_protocol(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # In memory first: torch.save hides the reason when a write fails.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        try:
            # Released before an error leaves: Python 3.12.0 and 3.12.1 crash when they collect a view of a BytesIO.
            with content.getbuffer() as view:
                _publish(view, _local(path))
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
        """Loads without running code from the file unless `weights_only=False`, also where Lightning would (http)."""
        refusal = CheckpointError(
            f"{path} is not a whole checkpoint: cut short, damaged, or another kind of file; resume from another"
        )
        if _is_local_file_protocol(path) and not _is_whole(_local(path)):
            if _is_of_old_format(_local(path)):
                raise CheckpointError(
                    f"{path} is in torch's format of before 1.6, which has no checksums: load it with torch.load, save "
                    "it to a new file with torch.save and resume from that"
                )
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


def check_checkpoint(path: Path) -> None:
    """CheckpointError unless a Trainer can go on from the file; reads every byte of it, but keeps none."""

    def without_values(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes(), device="meta")

    with suppress(ObjectsError):  # it is whole; whether it may be loaded is said when it is
        refuse_foreign(AtomicCheckpointIO().load_checkpoint(path, without_values), path)


def refuse_foreign(checkpoint: Any, path: str | Path) -> None:
    """CheckpointError for a file with content that no Trainer has saved."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} was not saved by a Trainer: it has no state_dict; resume from another")


def _local(path: str | Path) -> Path:
    return Path(get_filesystem(path)._strip_protocol(str(path)))


def _is_whole(path: Path) -> bool:
    """Whether the file, if there is one, is an archive with the right checksums, which torch leaves unread."""
    if not path.is_file():
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            # Without checksums, which is an option of torch, the archive's directory at the end of the file must do.
            return not torch.serialization.get_crc32_options() or archive.testzip() is None
    except PermissionError:
        raise  # nothing is known about it
    except (zipfile.BadZipFile, EOFError, OSError):
        return False


def _is_of_old_format(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_OLD_FORMAT)) == _OLD_FORMAT
    return False


def _publish(content: memoryview, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    partial = _partial(path)
    try:
        with partial.open("wb", buffering=0) as file:
            with suppress(OSError):  # some network file systems have no locks; there leftovers stay
                fcntl.flock(file, fcntl.LOCK_EX)
            num_written = 0
            while num_written < len(content):
                num_written += file.write(content[num_written:])
            os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    # The new name itself is on disk once the directory is.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _partial(path: Path) -> Path:
    """Beside the file; of a name that leaves no room for more, the end is cut off."""
    end = f".{os.getpid()}{PART}"
    room_bytes = os.pathconf(path.parent, "PC_NAME_MAX") - len(f".{end}")
    return path.with_name(f".{os.fsencode(path.name)[:room_bytes].decode(errors='ignore')}{end}")


def _remove_leftovers(folder: Path) -> None:
    """Removes what a killed process was writing; what a living one writes is locked."""
    for leftover in folder.glob(f".*{PART}"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
