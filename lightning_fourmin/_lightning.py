"""Parts of a Trainer, by Lightning's own names, that others take the place of."""

from collections.abc import Callable
from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGTERM_HANDLER, REQUEUE_HANDLER = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"
"""What Lightning does at SIGTERM, and when SLURM warns that the time is up."""
ASK_BEFORE_BATCH = "_broadcast_sigterm_tensor"
"""Its broadcast before every batch."""


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
