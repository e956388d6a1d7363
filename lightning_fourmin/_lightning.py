"""Private names of Lightning and torch that the package needs: the one file to read when either has a new release."""

from collections.abc import Callable
from types import FrameType

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.distributed_c10d import _get_default_store

SIGTERM_HANDLER, REQUEUE_HANDLER = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"
"""What Lightning does at SIGTERM, and when SLURM warns that the time is up."""
ASK_BEFORE_BATCH = "_broadcast_sigterm_tensor"
"""Its broadcast before every batch."""

# There is no public launcher of scripts to build on.
SubprocessScriptLauncher = _SubprocessScriptLauncher
ChildProcessObserver = _ChildProcessObserver
set_num_threads_if_needed = _set_num_threads_if_needed
# `dist.init_process_group` is the public way; this one also leaves an NCCL group in good order at exit.
init_dist_connection = _init_dist_connection
# The public AsyncCheckpointIO is one of several that wrap another CheckpointIO.
WrappingCheckpointIO = _WrappingCheckpointIO
# The public way is to make a store before the group and to hand it in; under srun or torchrun others make it.
get_default_store = _get_default_store


def set_handler(trainer: Trainer, name: str, handler: Callable[[int, FrameType | None], None] | None) -> None:
    """What Lightning registers for a signal before it runs, and takes back at the end, instead of its own `name`."""
    connector = vars(trainer._signal_connector)
    if handler is None:
        connector.pop(name, None)
    else:
        connector[name] = handler


def sigterm_exception(exit_code: int) -> SIGTERMException:
    """Lightning's exception for a run that was asked to end, with the exit code of the process.

    Lightning 2.6 takes the code as an argument, as any SystemExit does; from 2.7 on `__init__` takes none.
    """
    exception = SIGTERMException()
    exception.code = exit_code
    return exception
