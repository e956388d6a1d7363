"""The pool of ranks itself: results, errors, deadlines, a Trainer on emulated nodes and a killed parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.pool import RankFailure, RankPool
from tests.support.ranks import current_case, rank_env

DIE_WITH_A_POOL = """
import json, os, signal
from tests.support.pool import RankPool
from tests.support.test_ranks import pids

if __name__ == "__main__":
    print(json.dumps(RankPool().run(pids)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def sum_of_ranks(scale: float) -> torch.Tensor:
    tensor = torch.tensor([scale * current_case().rank])
    dist.all_reduce(tensor)
    return tensor


def layout() -> tuple[int, int, int, int]:
    case = current_case()
    return case.rank, case.node_rank, case.local_rank, case.local_size


def raise_in(rank: int) -> None:
    print(f"about to work in {current_case().rank}")
    if current_case().rank == rank:
        raise ValueError("no such bucket")
    dist.barrier()


def exit_in(rank: int) -> None:
    if current_case().rank == rank:
        os._exit(3)
    dist.barrier()


def sleep_in(rank: int) -> int:
    if current_case().rank == rank:
        time.sleep(60)
    return os.getpid()


def pids() -> tuple[int, int]:
    """Of the rank and of the server that it was forked from."""
    return os.getpid(), os.getppid()


def is_running(pid: int) -> bool:
    """A zombie is not: in a container there may be no one who reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def fit(strategy: str, **trainer_kwargs: Any) -> tuple[int, int, torch.Tensor]:
    case = current_case()
    data = RandomDataset(32, 2 * case.world)
    sampler: DistributedSampler[Any] | None = None
    if not trainer_kwargs.get("use_distributed_sampler", True):
        sampler = DistributedSampler(data, case.world, case.rank)
    trainer = Trainer(
        accelerator="cpu",
        devices=case.local_size,
        num_nodes=len(case.nodes),
        strategy=strategy,
        plugins=[rank_env()],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        **trainer_kwargs,
    )
    # A model that differs between the ranks: DDP must make it one.
    torch.manual_seed(case.rank)
    model = BoringModel()
    trainer.fit(model, DataLoader(data, sampler=sampler))
    return trainer.global_step, trainer.world_size, model.layer.weight.detach()


def test_ranks_share_a_group(ranks: RankPool) -> None:
    assert ranks.run(sum_of_ranks, 2.0, world=3) == [torch.tensor([6.0])] * 3


def test_emulated_nodes(ranks: RankPool) -> None:
    assert ranks.run(layout, nodes=[2, 1]) == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)]


@pytest.mark.parametrize("arguments", [{"world": 3, "nodes": [1, 1]}, {"nodes": [2, 0]}, {"world": 9}])
def test_impossible_layout(ranks: RankPool, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="make no pool: give node sizes"):
        ranks.run(layout, **arguments)


def test_error_names_its_rank_and_shows_its_output(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 raised:[\s\S]*no such bucket\noutput:\nabout to work in 1"):
        ranks.run(raise_in, 1)
    assert ranks.run(sum_of_ranks, 1.0) == [torch.tensor([1.0])] * 2


def test_dead_rank_is_named_and_replaced(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 died with exit code 3"):
        ranks.run(exit_in, 0)
    assert ranks.run(sum_of_ranks, 1.0) == [torch.tensor([1.0])] * 2


def test_missed_deadline_shows_the_stack_and_rebuilds_the_pool(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 did not answer \(1 s[\s\S]*in sleep_in") as failure:
        ranks.run(sleep_in, 1, timeout=1)
    assert "rank 0" not in str(failure.value)
    assert len(set(ranks.run(sleep_in, -1))) == 2


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1]])
def test_trainer_fits_on_emulated_nodes(ranks: RankPool, nodes: list[int]) -> None:
    equal = len(set(nodes)) == 1
    answers = ranks.run(fit, "ddp", nodes=nodes, use_distributed_sampler=equal, enable_progress_bar=False)
    for steps, world, weight in answers:
        assert (steps, world) == (2, sum(nodes))
        assert torch.equal(weight, answers[0][2])


def test_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DIE_WITH_A_POOL)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        left = {pid for pids in json.loads(parent.stdout.readline()) for pid in pids}
        assert parent.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {pid for pid in left if is_running(pid)}
    assert not left
