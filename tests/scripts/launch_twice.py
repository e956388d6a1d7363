"""Two calls of a script with two ranks, each with a launcher of its own; in the second one the launcher is killed."""

import os
import signal
import time
from pathlib import Path

from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_fourmin.faults import launcher
from tests.support.ranks import set_warning_filters

set_warning_filters()
launcher.GRACE_S = launcher.POLL_S = 0.1
READY = Path("ready")


def show_variables() -> None:
    names = sorted(name for name in os.environ if name.startswith("FOURMIN_"))
    print(f"rank {os.environ['LOCAL_RANK']} has {names}", flush=True)


def kill_launcher() -> None:
    """Rank 1 would go on for longer than any test waits."""
    if os.environ["LOCAL_RANK"] == "1":
        READY.touch()
        time.sleep(1000)
    while not READY.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for function in (show_variables, kill_launcher):
        launcher.PatientLauncher(LightningEnvironment(), num_processes=2, num_nodes=1).launch(function)
