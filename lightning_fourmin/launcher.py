"""Lightning's launcher of scripts, with time for the ranks to say which of them is gone."""

import atexit
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

GRACE_S = 10.0


class PatientLauncher(_SubprocessScriptLauncher):
    """Starts ranks as Lightning does, but does not kill all of them as soon as it sees that one has died."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            _PatientObserver(os.getpid(), self.procs, sleep_period=1).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException:
            # At the very end: the others learn what happened from this process, or wait to meet it for half an hour.
            atexit.register(self._end_children)
            raise

    def _end_children(self) -> None:
        deadline = time.monotonic() + GRACE_S / 2
        for child in self.procs:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


class _PatientObserver(_ChildProcessObserver):
    @override
    def _terminate_all(self) -> None:
        time.sleep(GRACE_S)
        super()._terminate_all()
