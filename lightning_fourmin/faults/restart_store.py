"""A store for one attempt of a run that torchrun may start again.

torchrun keeps one store for all attempts. A new attempt would find the addresses of processes that are gone in it, and
the number of restarts cannot tell attempts apart, because agents of different nodes count differently. So rank 0 draws
a name for the attempt and tells it to each rank that calls:

    rank 1   call/1 = 8f3a
    rank 0                   answer/8f3a = 51d0
    rank 1                                        51d0/1 = ""

All ranks then use keys that begin with the name, 51d0. Rank 0 also answers calls that earlier attempts have left, which
does no harm, as nobody reads these answers; it goes on until each rank has confirmed the name of this attempt.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_fourmin._lightning import init_dist_connection

POLL_S = 0.01
"""The pause between two looks of rank 0 for calls."""


def shares_agents_store() -> bool:
    """Whether torchrun has started this process and keeps the store itself, for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_group_of_attempt(environment: ClusterEnvironment, backend: str, timeout: timedelta, **kwargs: Any) -> None:
    """Makes the default process group in the store of this attempt; `kwargs` go to `dist.init_process_group`."""
    rank, num_ranks = environment.global_rank(), environment.world_size()
    store = store_of_attempt(environment.main_address, environment.main_port, rank, num_ranks, timeout)
    init_dist_connection(environment, backend, store=store, timeout=timeout, **kwargs)


def store_of_attempt(address: str, port: int, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """Returns the agent's store under keys that no other attempt uses.

    The call is a collective: rank 0 waits for all other ranks, and they wait for rank 0.
    """
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    meeting = dist.PrefixStore("fourmin/attempts", store)
    name = _tell(meeting, num_ranks, timeout) if rank == 0 else _ask(meeting, rank)
    return dist.PrefixStore(f"fourmin/{name}", store)


def _tell(store: dist.Store, num_ranks: int, timeout: timedelta) -> str:
    """Runs in rank 0: draws the name and answers calls until all ranks have confirmed it."""
    name, answered = uuid.uuid4().hex, set[str]()
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, num_ranks))
    while missing:
        for rank in missing:
            if store.check([f"call/{rank}"]) and (call := store.get(f"call/{rank}").decode()) not in answered:
                store.set(f"answer/{call}", name)
                answered.add(call)
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"waited {timeout.total_seconds():g} s for ranks {missing} to start")
        time.sleep(POLL_S)
    return name


def _ask(store: dist.Store, rank: int) -> str:
    """Runs in all other ranks: calls, waits for the name and confirms it."""
    call = uuid.uuid4().hex
    store.set(f"call/{rank}", call)
    name = store.get(f"answer/{call}").decode()
    store.set(f"{name}/{rank}", "")
    return name
