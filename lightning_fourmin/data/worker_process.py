"""What ties a worker process to its parent: it ends with the parent, and leaves signals to it.

Both functions are called at the start of a worker, in its main thread, and start one daemon thread each. Workers of
loaders call both, those of `fourmin pack` and `verify` only the first.
"""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """Lets this worker end as soon as its parent is gone, even killed, instead of waiting for its next task."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        # Not `sys.exit`, which would end this thread only.
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def leave_signals_to_parent() -> None:
    """Lets this worker ignore the signals that a terminal or a scheduler sends to all processes of a job.

    The parent handles them, and may still need what the worker makes, to end in good order. Only a SIGTERM that the
    parent itself sends is obeyed. Must be called before the worker starts threads, as these inherit the blocked signal.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # SIGUSR1 or 2: SLURM's warning that the time of a job is up.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS does not tell who has sent a signal
        return
    # For threads of libraries, which do not block the signal: without a handler it would end the process.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
