"""Lightning's launcher of scripts, with time for ranks to say which of them is gone, and no rank that stays behind."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_fourmin.files import file_in_memory

_CALLED, _DONE = b"c", b"d"
GRACE_S = 8.0
"""How long ranks may take to end by themselves."""
POLL_S = 0.5
LAUNCHER_PID, LAUNCHER_NOTE = "FOURMIN_LAUNCHER_PID", "FOURMIN_LAUNCHER_NOTE"
"""Variables: the process that started the ranks, and a file in memory that says whether it is in a Trainer's call."""


class PatientLauncher(_SubprocessScriptLauncher):
    """Starts ranks as Lightning does; when one has died the others may have their say before they are killed."""

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        if num_processes > 1 and not cluster_environment.creates_processes_externally and _in_hydra_multirun():
            raise RuntimeError(
                "Hydra multirun cannot start ranks by running the command again: each rank would replay the whole "
                "sweep. Use strategy='fourmin_spawn', which starts ranks from this process."
            )

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHER_PID] = str(os.getpid())
            if (note := file_in_memory("fourmin-launcher")) is not None:
                os.environ[LAUNCHER_NOTE] = f"/proc/{os.getpid()}/fd/{note}"
            self._call_children_scripts()
            _PatientObserver(os.getpid(), self.procs, sleep_period=1).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with _ended_with_launcher():
            return function(*args, **kwargs)


class _PatientObserver(_ChildProcessObserver):
    @override
    def _terminate_all(self) -> None:
        time.sleep(GRACE_S)
        super()._terminate_all()


@contextmanager
def _ended_with_launcher() -> Iterator[None]:
    """A rank whose launcher was lost ends soon after, also where it waits to meet the others for half an hour.

    A launcher that has ended its own part of the call is not lost: others may take longer to predict or test.
    """
    launcher, started_by = str(os.getppid()), os.environ.get(LAUNCHER_PID)
    note = _opened_note() if started_by in (launcher, str(os.getpid())) else None
    if started_by != launcher:
        if note is None:
            yield
            return
        os.pwrite(note, _CALLED, 0)
        try:
            yield
            os.pwrite(note, _DONE, 0)
        finally:
            os.close(note)
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            if str(os.getppid()) == launcher:
                continue
            if note is not None and os.pread(note, 1, 0) == _DONE:
                return
            if not done.wait(GRACE_S):
                os._exit(1)

    thread = threading.Thread(target=watch, name="fourmin-launcher-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if note is not None:
            os.close(note)


def _opened_note() -> int | None:
    with suppress(KeyError, OSError):
        return os.open(os.environ[LAUNCHER_NOTE], os.O_RDWR)
    return None


def _in_hydra_multirun() -> bool:
    if "hydra.core.hydra_config" not in sys.modules:
        # Nobody has started Hydra here; it need not be installed.
        return False
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
