"""A training that torchrun has started again goes on in the folder of its job.

The agents keep one store for all attempts of a job. Rank 0 leaves there which folder it writes to and which checkpoints
others had saved in it; the next attempt goes on from the newest one that was saved since. Rank 0 decides for all:
agents of several nodes count restarts differently.
"""

import json
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from lightning_fourmin.errors import CheckpointError
from lightning_fourmin.faults.restart_store import shares_agents_store, store_of_attempt
from lightning_fourmin.runs.resume import first_whole, override, saved, say

KEY = "fourmin/run"


def overrides_of_restart() -> list[str]:
    """What every rank adds to its command line; nothing where no earlier attempt has saved anything."""
    if not shares_agents_store():
        return []
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = store_of_attempt(address, port, rank, num_ranks, default_pg_timeout)
    if rank == 0:
        attempt.set("checkpoint", _to_go_on_from(_agents_store()))
    checkpoint = attempt.get("checkpoint").decode()
    if not checkpoint:
        return []
    return [override("run_dir", Path(checkpoint).parent.parent), override("resume", checkpoint)]


def remember_run(folder: Path) -> None:
    """For the attempts to come, on rank 0."""
    if shares_agents_store():
        remember(_agents_store(), folder)


def remember(store: dist.Store, folder: Path) -> None:
    path = str(folder.absolute())
    if not store.check([KEY]) or json.loads(store.get(KEY))["folder"] != path:
        store.set(KEY, json.dumps({"folder": path, "foreign": _files(folder)}))


def newest_of_job(store: dist.Store) -> Path | None:
    """The newest whole checkpoint that earlier attempts have saved."""
    run = json.loads(store.get(KEY))
    folder = Path(run["folder"])
    files = _files(folder)
    own = [path for path in saved(folder) if files[path.name] != run["foreign"].get(path.name)]
    return first_whole(own) if own else None


def _to_go_on_from(store: dist.Store) -> str:
    if not store.check([KEY]):
        return ""
    try:
        checkpoint = newest_of_job(store)
    except CheckpointError as error:
        say(str(error))
        checkpoint = None
    afresh = ": there is nothing to go on from, it begins afresh" if checkpoint is None else ""
    say(f"torchrun has started this job again{afresh}")
    return "" if checkpoint is None else str(checkpoint)


def _files(folder: Path) -> dict[str, int]:
    """When each checkpoint was saved."""
    return {path.name: path.stat().st_mtime_ns for path in saved(folder)}


def _agents_store() -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
