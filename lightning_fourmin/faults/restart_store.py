"""A store for one attempt of a run that torchrun may start again.

torchrun keeps one store for all attempts. In it a new attempt would meet the addresses of processes that are gone, and
the number of restarts cannot tell attempts apart: agents of different nodes count differently. So rank 0 draws a name
for the attempt and tells it to the ranks that call now:

    rank 1   call/1 = 8f3a                                     calls that earlier attempts have left get an answer,
    rank 0            answer/8f3a = 51d0                       too, but nobody reads it
    rank 1                               51d0/1 = ""

All ranks then use keys that begin with the name, 51d0.
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


def shares_agents_store() -> bool:
    """Whether torchrun has started this process and keeps the store itself, for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_group_of_attempt(environment: ClusterEnvironment, backend: str, timeout: timedelta, **kwargs: Any) -> None:
    """Makes the default process group in the store of this attempt; `kwargs` go to `dist.init_process_group`."""
    address, port = environment.main_address, environment.main_port
    store = store_of_attempt(address, port, environment.global_rank(), environment.world_size(), timeout)
    init_dist_connection(environment, backend, store=store, timeout=timeout, **kwargs)


def store_of_attempt(address: str, port: int, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """The agent's store under keys that no other attempt uses; a call waits for those of all ranks."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    meeting = dist.PrefixStore("fourmin/attempts", store)
    name = _tell(meeting, num_ranks, timeout) if rank == 0 else _ask(meeting, rank)
    return dist.PrefixStore(f"fourmin/{name}", store)


def _tell(store: dist.Store, num_ranks: int, timeout: timedelta) -> str:
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
    call = uuid.uuid4().hex
    store.set(f"call/{rank}", call)
    name = store.get(f"answer/{call}").decode()
    store.set(f"{name}/{rank}", "")
    return name
