"""The ties of a worker process to its parent: a worker ends with its parent, and leaves signals to the parent.

Both functions are called at the start of a worker, in its main thread, and start one daemon thread each. Workers of
loaders call both, those of `fourmin pack` and `verify` only the first.
"""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """Lets this worker end as soon as its parent has ended, even if that was killed and could not tell its workers."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        # Not `sys.exit`, which would end this thread only.
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def leave_signals_to_parent() -> None:
    """Lets this worker ignore the signals that a terminal or a scheduler sends to all processes of a job.

    The parent handles them, and may still need results of the worker to end in good order. Only a SIGTERM that the
    parent itself sends is obeyed. Must be called before the worker starts threads, because SIGTERM is blocked in this
    thread and those that it starts later.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # SIGUSR1 or 2: SLURM's warning that the time of a job is up.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS does not tell who has sent a signal
        return
    # Threads that libraries have started before do not block SIGTERM. Without a handler it would end the process there.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
