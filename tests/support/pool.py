"""A pool of real gloo ranks that live as long as the pytest session.

pytest process                         rank processes (forked when a case first needs them, then kept)
  TCPStore on 127.0.0.1  <------------   rank 0 .. world-1 join a fresh default group
  RankPool.run  -- case ------------->   fn(*args, **kwargs)
                <- result or error ---
                -- finish ----------->   destroy the group
                <- idle --------------   ready for the next case

Ranks are forked from a server that has imported Lightning once: the import takes 4 s of CPU. Ranks watch the pytest
process, and the server ends when the last process that knows it has: nothing outlives pytest, however that ends.
"""

import atexit
import multiprocessing
import operator
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.ranks import ADDRESS, Case, rank_main

MAX_RANKS = 8
START_TIMEOUT_S = 120.0
# How long the peers of a failed rank may take to answer: they are mostly blocked in a collective with it.
GRACE_S = 5.0
LEAVE_TIMEOUT_S = 10.0
# How long silent ranks may take to write their stacks before they are killed.
STACKS_TIMEOUT_S = 5.0
LOG_LINES = 40


class RankFailure(AssertionError):
    """A case failed; the text names each rank that did, with its traceback and output."""


@contextmanager
def _rank_environment() -> Iterator[None]:
    """The environment of the server, and so of its ranks."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [before.get("PYTHONPATH")])]
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = ADDRESS
    # A server with one thread is safe to fork; without it Lightning's launcher picks a number of threads itself, too.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Rank:
    """The parent's end of a rank process."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.log = directory / f"rank{rank}.log"
        self.log.touch()
        self._log_start = 0
        self.connection, theirs = multiprocessing.Pipe()
        # Not a daemon: those may have no children, and DataLoader workers are children.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.ranks", "lightning_fourmin"])
        self.process = context.Process(
            target=rank_main, args=(theirs, str(self.log), str(directory)), name=f"rank{rank}"
        )
        with _rank_environment():
            self.process.start()
        theirs.close()

    @property
    def log_bytes(self) -> int:
        return self.log.stat().st_size

    def start_case(self, case: Case, call: bytes) -> None:
        self._log_start = self.log_bytes
        self.connection.send((case, call))

    def output(self) -> str:
        """The last lines the rank wrote in this case."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(["output:", *lines]) if lines else "no output"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """Runs functions in real gloo ranks, one process a rank, all on the loopback interface."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        # TCPStore's own socket would listen on every interface.
        listener = socket.create_server((ADDRESS, 0), backlog=4 * MAX_RANKS)
        self._port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._num_cases = 0
        atexit.register(self.close)

    def close(self) -> None:
        """Ends every rank and the server."""
        atexit.unregister(self.close)
        self._kill()
        # It ends by itself, but takes a second, and pytest shall leave nothing behind.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        self._directory.cleanup()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        nodes: Sequence[int] | None = None,
        timeout: float = 60,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` in ranks that share a fresh default group; results in rank order.

        `fn` is a function at the top of a module; arguments and results are pickled. `nodes` gives the ranks
        of each emulated node, e.g. [3, 1]; without it all are on one, 2 unless `world` says otherwise.
        `timeout` (seconds) bounds the case and its collectives. A rank that raises, dies or does not answer
        makes a `RankFailure`; after the latter two the next case gets new processes.
        """
        layout = tuple(nodes) if nodes is not None else (2 if world is None else world,)
        if world not in (None, sum(layout)) or min(layout) < 1 or sum(layout) > MAX_RANKS:
            raise ValueError(
                f"world={world} and nodes={nodes} make no pool: give node sizes of at least 1 that add up to "
                f"the world, at most {MAX_RANKS} ranks in all."
            )
        call = pickle.dumps((fn, args, kwargs))
        try:
            self._start(sum(layout))
            return self._run(layout, call, timeout)
        except RankFailure:
            raise
        except BaseException:
            self._kill()
            raise

    def _run(self, layout: tuple[int, ...], call: bytes, timeout: float) -> list[Any]:
        self._num_cases += 1
        ranks = self._ranks[: sum(layout)]
        for rank in ranks:
            rank.start_case(Case(rank.rank, layout, self._num_cases, self._port, timeout), call)
        results: dict[int, Any] = {}
        failures: list[str] = []

        def failed(rank: _Rank, answer: Any) -> bool:
            passed, payload = answer
            if passed:
                results[rank.rank] = pickle.loads(payload)
            else:
                failures.append(f"rank {rank.rank} raised:\n{payload.decode()}{rank.output()}")
            return not passed

        silent = self._collect(ranks, timeout, failed)
        if silent:
            failures += self._describe(silent, timeout)
            self._kill()
        else:
            self._finish(ranks)
        if failures:
            raise RankFailure("\n\n".join(failures))
        return [results[rank.rank] for rank in ranks]

    def _start(self, world: int) -> None:
        if not all(rank.process.is_alive() for rank in self._ranks):
            self._kill()
        num_kept = len(self._ranks)
        for rank in range(num_kept, world):
            self._ranks.append(_Rank(rank, Path(self._directory.name)))
        silent = self._collect(self._ranks[num_kept:], START_TIMEOUT_S)
        if silent:
            failures = self._describe(silent, START_TIMEOUT_S)
            self._kill()
            raise RankFailure("The pool did not start.\n" + "\n\n".join(failures))

    def _finish(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            with suppress(BrokenPipeError):
                rank.connection.send("finish")
        # Leaving a group may hang on work of the case that is still under way; the result stands.
        if self._collect(ranks, LEAVE_TIMEOUT_S):
            self._kill()

    @staticmethod
    def _collect(
        ranks: list[_Rank], timeout: float, failed: Callable[[_Rank, Any], bool] = lambda rank, answer: False
    ) -> list[_Rank]:
        """Waits for an answer of each rank and returns the silent ones.

        After the first that failed or died the others have GRACE_S.
        """
        deadline = time.monotonic() + timeout
        waiting = {rank.connection: rank for rank in ranks}
        dead: list[_Rank] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    trouble = failed(rank, connection.recv())
                except (EOFError, ConnectionResetError):
                    # The connection closes a moment before the exit code is known.
                    rank.process.join(GRACE_S)
                    dead.append(rank)
                    trouble = True
                if trouble:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [*dead, *waiting.values()]

    @staticmethod
    def _describe(silent: list[_Rank], timeout: float) -> list[str]:
        alive = [rank for rank in silent if rank.process.is_alive()]
        sizes = before = [rank.log_bytes for rank in alive]
        for rank in alive:
            assert rank.process.pid is not None
            os.kill(rank.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        while alive and time.monotonic() < deadline:
            time.sleep(0.1)
            previous, sizes = sizes, [rank.log_bytes for rank in alive]
            if sizes == previous and all(map(operator.gt, sizes, before)):
                break
        return [
            f"rank {rank.rank} did not answer ({timeout:g} s, or {GRACE_S:g} s after another rank failed); "
            f"its stacks end its output.\n{rank.output()}"
            if rank in alive
            else f"rank {rank.rank} died with exit code {rank.process.exitcode}.\n{rank.output()}"
            for rank in silent
        ]

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
