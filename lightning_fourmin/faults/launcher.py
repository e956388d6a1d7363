"""Lightning's launcher of scripts, with time for ranks to say which of them is gone, and no rank that stays behind.

launcher        is local rank 0; starts the other ranks of its machine and gives them its process id and the path of a
                status file in memory, which holds "c" during a call of a Trainer and "d" after one that ended well
other ranks     a thread looks whether the launcher is still the parent; if it has gone in the middle of a call,
                the rank ends, too, after `GRACE_S`
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_fourmin._lightning import ChildProcessObserver, SubprocessScriptLauncher, set_num_threads_if_needed
from lightning_fourmin.files import file_in_memory

GRACE_S = 8.0
"""How long ranks may take to end by themselves."""
POLL_S = 0.5
"""The pause between two looks of a rank at its parent."""
LAUNCHER_PID, LAUNCHER_STATUS = "FOURMIN_LAUNCHER_PID", "FOURMIN_LAUNCHER_NOTE"
"""Environment variables of the ranks that a launcher has started: its process id, and the path of its status file."""
_IN_CALL, _ENDED_WELL = b"c", b"d"


class PatientLauncher(SubprocessScriptLauncher):
    """Starts ranks as Lightning does; when one has died, the others have time to say so before they are killed."""

    _status: ClassVar[tuple[int, int] | None] = None
    """The id of the process that has started ranks and the descriptor of its status file; None if it started none.

    The class holds it because each Trainer of a script has a launcher, and only the first of them starts the ranks. The
    id tells the process from those that it forks.
    """

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
            self._start_ranks()
        set_num_threads_if_needed(num_processes=self.num_processes)
        with self._ended_with_launcher():
            return function(*args, **kwargs)

    def _start_ranks(self) -> None:
        variables = {LAUNCHER_PID: str(os.getpid())}
        if (file := file_in_memory("fourmin-launcher")) is not None:
            PatientLauncher._status = os.getpid(), file
            variables[LAUNCHER_STATUS] = f"/proc/{os.getpid()}/fd/{file}"
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ.update(variables)
        try:
            self._call_children_scripts()
        finally:
            # Otherwise a script that this one starts later would take itself for a rank.
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
        _PatientObserver(os.getpid(), self.procs, sleep_period=1).start()

    @contextmanager
    def _ended_with_launcher(self) -> Iterator[None]:
        """Ends a rank soon after its launcher was lost, even while it waits for the other ranks to start.

        A launcher that has ended its own part of the call is not lost: other ranks may take longer to predict or test.
        """
        if self._status is not None and self._status[0] == os.getpid():
            os.pwrite(self._status[1], _IN_CALL, 0)
            yield
            os.pwrite(self._status[1], _ENDED_WELL, 0)
        elif os.environ.get(LAUNCHER_PID) == str(os.getppid()):
            with _watch_of_launcher():
                yield
        else:
            yield


class _PatientObserver(ChildProcessObserver):
    """Lightning's thread that kills all ranks when one has died; it waits for `GRACE_S` before."""

    @override
    def _terminate_all(self) -> None:
        time.sleep(GRACE_S)
        super()._terminate_all()


@contextmanager
def _watch_of_launcher() -> Iterator[None]:
    """Lets a thread end this process when the launcher is lost while the context is open."""
    launcher, status, done = os.getppid(), None, threading.Event()
    with suppress(KeyError, OSError):
        status = os.open(os.environ[LAUNCHER_STATUS], os.O_RDONLY)

    def watch() -> None:
        while not done.wait(POLL_S):
            if os.getppid() == launcher:
                continue
            if status is not None and os.pread(status, 1, 0) == _ENDED_WELL:
                return
            if not done.wait(GRACE_S):
                os._exit(1)  # sys.exit would end only this thread

    thread = threading.Thread(target=watch, name="fourmin-launcher-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if status is not None:
            os.close(status)


def _in_hydra_multirun() -> bool:
    # Hydra may not be installed, so it is not imported here; in a script that runs under it, it is imported already.
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return False
    # A config that was only composed, as in a notebook, has no mode.
    mode = hydra.HydraConfig.get().mode
    return mode is not None and mode.name == "MULTIRUN"
