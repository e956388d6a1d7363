"""Who starts the ranks of a command, and the start of those that the command starts itself.

    the command      joins its ranks; SIGTERM is passed on to them; Ctrl-C ends them, by force after a grace period
      rank 0, 1 ...  fresh processes that are given the composed config; a terminal sends Ctrl-C to them as well

No rank is the process that sweeps: a job leaves nothing there that the next one could trip over, and ranks do not run
the command line again, which under a sweep would start the whole sweep again.
"""

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from types import FrameType
from typing import Any, Literal

import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.multiprocessing.spawn import ProcessContext, ProcessException, ProcessExitedException

from lightning_fourmin._lightning import sigterm_exception
from lightning_fourmin.callbacks.preemption import EXIT_CODE as PREEMPTED
from lightning_fourmin.errors import RankError

GRACE_S = 10.0
"""The seconds that ranks may take to end after one has failed or Ctrl-C was pressed."""
NUM_PORTS = 3
"""The number of ports to try: one that was free may be taken by another process before rank 0 listens on it."""
MESSAGE_CHARACTERS, DETAILS_CHARACTERS = 2_000, 30_000
"""The most that a rank passes on of an error: what does not fit into the pipe would block it until somebody reads."""
_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS",
)  # fmt: skip
"""The variables that would make a Trainer believe that somebody else has started the rank."""


@dataclass(frozen=True)
class Launch:
    """Who has started this process, found once when a command begins."""

    by: Literal["user", "torchrun", "srun"]
    """user: the process is a command, which starts its ranks; else it is one of the ranks that a launcher started."""
    rank: int = 0
    """The rank under a launcher; 0 for a command."""

    @classmethod
    def detect(cls) -> "Launch":
        """Reads the environment of this process."""
        if TorchElasticEnvironment.detect():
            return cls("torchrun", int(os.environ["RANK"]))
        # A batch script, and the shell that salloc opens, are no tasks of srun: they are in none of its steps.
        if "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect():
            return cls("srun", int(os.environ["SLURM_PROCID"]))
        return cls("user")

    @property
    def is_external(self) -> bool:
        """Whether a launcher has started the ranks, so that the command must not."""
        return self.by != "user"


@dataclass(frozen=True)
class _Failure:
    """The error of a rank, as it travels to the command."""

    message: str
    details: str


def run_ranks(work: Callable[[dict[str, Any]], None], config: dict[str, Any], num_ranks: int) -> None:
    """Calls `work(config)` in `num_ranks` processes, which a Trainer takes for ranks that a launcher has started.

    Raises RankError with the error of the first rank that failed, and SIGTERMException if the ranks have ended because
    they were asked to.
    """
    for attempt in range(1, NUM_PORTS + 1):
        try:
            return _run_ranks(work, config, num_ranks)
        except RankError as error:
            if "EADDRINUSE" not in str(error) or attempt == NUM_PORTS:
                raise


def _run_ranks(work: Callable[[dict[str, Any]], None], config: dict[str, Any], num_ranks: int) -> None:
    failures: SimpleQueue[_Failure] = mp.get_context("spawn").SimpleQueue()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    # torch announces each signal that it sends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Where rank 0 is killed, its store makes every other rank print dozens of C++ frames before our sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = (work, config, environment, failures)
    # Ranks are born with Ctrl-C held back: while they import, it would end them with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        context = mp.start_processes(_rank_main, arguments, nprocs=num_ranks, join=False, start_method="spawn")
        with _sigterm_passed_on(context):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            while not context.join(grace_period=GRACE_S):
                pass
    except ProcessException as error:
        if not failures.empty():
            failure = failures.get()
            raise RankError(failure.message, failure.details) from None
        if isinstance(error, ProcessExitedException) and error.exit_code in (PREEMPTED, -signal.SIGTERM):
            raise sigterm_exception(PREEMPTED) from None
        end = f"exit code {error.exit_code}" if isinstance(error, ProcessExitedException) else "an error"
        end = getattr(error, "signal_name", None) or end
        hint = (
            ": the machine may be out of memory; lower data.batch_size or data.num_workers" if end == "SIGKILL" else ""
        )
        raise RankError(f"rank {error.error_index} ended with {end}{hint}", "") from None
    except KeyboardInterrupt:
        _end(context)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        failures.close()


@contextmanager
def _sigterm_passed_on(context: ProcessContext) -> Iterator[None]:
    """Passes SIGTERM on to the ranks, which may have something to save, and keeps waiting for them."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for process in context.processes:
            process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(context: ProcessContext) -> None:
    """Ends the ranks as Ctrl-C does, and by force those that are still there after the grace period."""
    deadline = time.monotonic() + GRACE_S
    for process in context.processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _rank_main(
    local_rank: int,
    work: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    environment: dict[str, str],
    failures: "SimpleQueue[_Failure]",
) -> None:
    """The process of one rank: `work` in an environment that names the rank, its first error passed on."""
    signal.signal(signal.SIGINT, _interrupt_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A spawned process spawns its own children, too: each loader worker would import everything once more. None gives
    # back the platform's default: fork, from Python 3.14 on forkserver.
    multiprocessing.set_start_method(None, force=True)
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment, LOCAL_RANK=str(local_rank))
    try:
        work(config)
    except Exception as error:
        # The command reads the first error: the other ranks fail because their peer is gone.
        message, details = message_of(error), traceback.format_exc()
        where = f"rank {local_rank}:\n{details[-DETAILS_CHARACTERS:]}"
        failures.put(_Failure(message[:MESSAGE_CHARACTERS], where))
        raise


def _interrupt_once(signum: int, frame: FrameType | None) -> None:
    # A terminal sends Ctrl-C to every process of the group, and the command sends it once more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def message_of(error: BaseException) -> str:
    """The text of an error, or its kind where it has none."""
    return str(error) or type(error).__name__
