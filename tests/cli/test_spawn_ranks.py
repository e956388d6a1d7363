"""Ranks of `fourmin train` on this machine: who they are, and what the command hears of one that dies."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.distributed import TCPStore

from lightning_fourmin.cli import spawn_ranks as launch
from lightning_fourmin.cli.spawn_ranks import Launch, message_of, run_ranks
from lightning_fourmin.cli.train_rank import make
from lightning_fourmin.errors import ConfigError, RankError


def write_environment_then_die(config: dict[str, Any]) -> None:
    """Rank 1 is killed while rank 0 waits for it."""
    rank = int(os.environ["LOCAL_RANK"])
    names = ("LOCAL_RANK", "MASTER_ADDR", "NODE_RANK", "WORLD_SIZE")
    text = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    Path(config["folder"], f"rank{rank}.txt").write_text(f"{os.getpid()} {text}")
    if rank == 1:
        while not Path(config["folder"], "rank0.txt").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def test_a_killed_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    # What an earlier launcher may have left in the environment.
    monkeypatch.setenv("NODE_RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(
        RankError, match=r"rank 1 ended with SIGKILL: the machine may be out of memory; lower data\.batch_size"
    ):
        run_ranks(write_environment_then_die, {"folder": str(tmp_path)}, 2)
    for rank in range(2):
        pid, *environment = (tmp_path / f"rank{rank}.txt").read_text().split()
        assert environment == [f"LOCAL_RANK={rank}", "MASTER_ADDR=127.0.0.1", "NODE_RANK=None", "WORLD_SIZE=None"]
        assert not Path("/proc", pid).exists()
    assert os.environ["WORLD_SIZE"] == "9"


def fail_at_length(config: dict[str, Any]) -> None:
    raise ValueError("more than a pipe holds: " + "x" * 200_000)


def test_a_long_error_ends_the_run() -> None:
    with pytest.raises(RankError, match="more than a pipe holds: x") as error:
        run_ranks(fail_at_length, {}, 1)
    assert error.value.details.endswith("xxx\n")


def test_messages_of_errors() -> None:
    assert message_of(ValueError("lr is bad")) == "lr is bad"
    assert message_of(AssertionError()) == "AssertionError"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"_target_": "torch.nn.Linear", "_args_": ["abc", 0]}, "part: "),
        ({"_target_": "torch.nn.Linaer"}, r"part: Error loading 'torch.nn.Linaer'"),
        ({"_target_": "lightning_fourmin.ShardDataModule", "_args_": ["shards", 0]}, "batch_size=0 must be at least 1"),
        ({"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Linear"}]}, r"part: .*__init__\(\)"),
    ],
)
def test_what_cannot_be_made_of_the_config(part: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=f"^{message}"):
        make("part", part)


def is_started_by_slurm(config: dict[str, Any]) -> None:
    Path(config["file"]).write_text(str(SLURMEnvironment.detect()))


def test_in_an_allocation_ranks_are_those_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    assert SLURMEnvironment.detect()
    assert not Launch.detect().is_external
    run_ranks(is_started_by_slurm, {"file": str(tmp_path / "answer")}, 1)
    assert (tmp_path / "answer").read_text() == "False"
    # A batch script has this, too.
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert not Launch.detect().is_external
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert Launch.detect() == Launch("srun", 3)


def listen(config: dict[str, Any]) -> None:
    TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size=1, is_master=True)


def test_another_port_is_tried_when_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], find_free_network_port()])
        monkeypatch.setattr(launch, "find_free_network_port", lambda: next(ports))
        run_ranks(listen, {}, 1)
    assert next(ports, None) is None
