"""What ties a worker process to its parent: it ends with it, and leaves signals to it."""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """Called in a worker: it ends as soon as its parent is killed, instead of waiting for its next task."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def leave_signals_to_parent() -> None:
    """Called in a worker, before it starts threads: what a terminal or a scheduler sends to all is for the parent.

    The parent may still need what the worker makes, to end in good order. SIGTERM from the parent itself is obeyed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # SIGUSR1 or 2: SLURM's warning that the time of a job is up.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS does not tell who has sent a signal
        return
    # For threads of libraries, which do not block it: without a handler it would end the process.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
