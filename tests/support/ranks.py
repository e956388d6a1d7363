"""A rank process of the pool: the case it runs, what it tells Lightning about it, and its life from case to case."""

import faulthandler
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

ADDRESS = "127.0.0.1"

# Warnings are errors, in pytest and in the ranks, but for these: regex of the message's start, category.
# A regex must not hold a colon: pytest splits at it.
WARNING_EXCEPTIONS: tuple[tuple[str, type[Warning]], ...] = (
    # lightning 2.6 builds torch's deprecated LeafSpec for every loader that is not in a collection.
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    # Tests load without workers on purpose; Lightning minds on machines with more cores than ours.
    (r"The '.*' does not have many workers", PossibleUserWarning),
    # Tests ask for the CPU on purpose, also on a machine with a GPU.
    (r"GPU available but not used", PossibleUserWarning),
    # What torch 2.15 says when it compiles on the first release of Python 3.13.
    (r"Guards may run slower on Python 3\.13\.0", RuntimeWarning),
)


@dataclass(frozen=True)
class Case:
    """Who a rank is in the case it runs."""

    rank: int
    nodes: tuple[int, ...]
    """Ranks of each emulated node."""
    number: int
    store_port: int
    timeout_s: float

    @property
    def world(self) -> int:
        return sum(self.nodes)

    @property
    def node_rank(self) -> int:
        return next(node for node in range(len(self.nodes)) if self.rank < sum(self.nodes[: node + 1]))

    @property
    def local_rank(self) -> int:
        return self.rank - sum(self.nodes[: self.node_rank])

    @property
    def local_size(self) -> int:
        return self.nodes[self.node_rank]


CASE: Case | None = None
"""Set in a rank while it runs a case. Read it with `current_case`: an imported name keeps its old value."""


def current_case() -> Case:
    """The case this rank runs."""
    if CASE is None:
        raise RuntimeError("No case is running: this is for functions that RankPool.run calls.")
    return CASE


class PoolEnvironment(ClusterEnvironment):
    """Tells Lightning the layout of the running case.

    For `Trainer(accelerator="cpu", devices=current_case().local_size, num_nodes=len(current_case().nodes),
    plugins=[rank_env()])`. Ranks and world size are the case's, whatever Lightning makes of the two numbers.
    One limit is left: `DDPStrategy.distributed_sampler_kwargs` takes devices * num_nodes for the number of
    replicas, which is wrong with unequal nodes. There a strategy that does not override it needs
    `use_distributed_sampler=False` and a sampler of the test's own.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return ADDRESS

    @property
    @override
    def main_port(self) -> int:
        return current_case().store_port

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return current_case().world

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return current_case().rank

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return current_case().local_rank

    @override
    def node_rank(self) -> int:
        return current_case().node_rank


def rank_env() -> PoolEnvironment:
    """The cluster environment of the running case, for `Trainer(plugins=[...])`."""
    current_case()
    return PoolEnvironment()


def set_warning_filters() -> None:
    warnings.simplefilter("error")
    for message, category in WARNING_EXCEPTIONS:
        warnings.filterwarnings("ignore", message=message, category=category)


def _join_group(case: Case) -> None:
    timeout = timedelta(seconds=case.timeout_s)
    store = dist.TCPStore(ADDRESS, case.store_port, is_master=False, timeout=timeout)
    prefixed = dist.PrefixStore(f"case{case.number}", store)
    dist.init_process_group("gloo", store=prefixed, rank=case.rank, world_size=case.world, timeout=timeout)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def restore_loaders() -> None:
    """Lightning wraps the methods of torch's loaders while it asks for one, and an error leaves them wrapped."""
    for base in (DataLoader, BatchSampler):
        for cls in {base, *get_all_subclasses(base)}:
            for name in ("__init__", "__setattr__", "__delattr__"):
                if name in vars(cls):
                    setattr(cls, name, inspect.unwrap(vars(cls)[name]))
                if (kept := f"__old{name}") in vars(cls):
                    delattr(cls, kept)


def _run_case(case: Case, call: bytes) -> tuple[bool, bytes]:
    """Whether the case passed, and its pickled result or the text of its traceback."""
    global CASE
    # A case must not feel the one before it.
    set_warning_filters()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    rank_zero_only.rank = case.rank  # type: ignore[attr-defined]
    environment = dict(os.environ)
    CASE = case
    try:
        fn, args, kwargs = pickle.loads(call)
        _join_group(case)
        return True, pickle.dumps(fn(*args, **kwargs))
    except BaseException:
        return False, traceback.format_exc().encode()
    finally:
        CASE = None
        restore_loaders()
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout.flush()
        sys.stderr.flush()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def rank_main(connection: Connection, log: str, directory: str) -> None:
    """The life of a rank process."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # Ctrl-C reaches the whole process group; the parent decides when a rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # What a Trainer writes by default lands here and not in the repo.
    os.chdir(directory)
    # The ranks of a real launcher start their loader workers the platform's way.
    multiprocessing.set_start_method(None, force=True)
    connection.send("ready")
    while True:
        try:
            case, call = connection.recv()
        except EOFError:
            return
        passed, payload = _run_case(case, call)
        connection.send((passed, payload))
        if not passed:
            # Not when all have answered: the closed connections wake the peers.
            _leave_group()
        connection.recv()
        _leave_group()
        connection.send("idle")
