"""Launches that take long: ranks import everything anew, wait for each other when they meet again, or for time-outs."""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import tests.faults.test_faults_restart as restart
from lightning_fourmin.runs.metrics import read_metrics, resumed_steps
from tests.data.test_datamodule import TESTS, run_until
from tests.faults.test_launchers import SCRIPT, checksum, free_port, running
from tests.support.counting import numbers_module
from tests.support.shards import write_numbers


def test_torchrun_goes_on_on_two_nodes_that_count_restarts_differently(tmp_path: Path) -> None:
    undisturbed = restart.checksum([restart.SCRIPT, "2", str(tmp_path)], tmp_path)
    options = "--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id survive --max-restarts 2"
    launcher = ["-m", "torch.distributed.run", *options.split(), "--local_addr", "127.0.0.1"]
    endpoint = ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    with ExitStack() as stack:
        runs = []
        for node in range(2):
            directory = tmp_path / f"node{node}"
            directory.mkdir()
            arguments = [*launcher, *endpoint, restart.SCRIPT, "1x2", str(tmp_path), "1:7:SIGKILL:10"]
            runs.append(stack.enter_context(running(arguments, directory)))
        for run in runs:
            assert run.process.wait(240) == 0, "\n".join(run.output for run in runs)
            assert run.left() == []
        assert re.findall(r"checksum (\w+)", "".join(run.output for run in runs)) == [undisturbed]


def test_sigterm_to_all_processes_saves_before_they_end(tmp_path: Path) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    for folder in (whole, ended):
        folder.mkdir()
    with running([restart.SCRIPT, "2", str(ended), "0:7:SIGTERM:0:group"], ended) as run:
        assert run.process.wait(120) == 143, run.output
        assert run.left() == []
        assert re.search(r"asked to end by SIGTERM: saved .*last.ckpt after step 8", run.output), run.output
    undisturbed = restart.checksum([restart.SCRIPT, "2", str(whole)], whole)
    assert restart.checksum([restart.SCRIPT, "2", str(ended)], ended) == undisturbed


def test_ranks_of_a_script_end_when_rank_1_is_killed(tmp_path: Path) -> None:
    restart.check_end_when_killed(tmp_path, 1)


def test_fourmin_train_goes_on_in_its_folder(tmp_path: Path) -> None:
    length = "strategy.trace=true trainer.max_epochs=12 trainer.limit_train_batches=3 trainer.limit_val_batches=1"
    options = f"trainer=torchrun trainer.accelerator=cpu {length} trainer.log_every_n_steps=1 data.num_workers=0"
    command = ["-m", "lightning_fourmin", "train", *options.split()]
    with running([*restart.torchrun("--max-restarts", "1"), *command], tmp_path) as run:
        run.wait_until(lambda: list(tmp_path.glob("runs/digits/*/checkpoints/last.ckpt")))
        (victim,) = run.processes("RANK=1")
        os.kill(victim, signal.SIGKILL)
        assert run.process.wait(120) == 0, run.output
        assert run.left() == []
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    checkpoint = re.escape(str(folder / "checkpoints" / "last.ckpt"))
    assert len(list(folder.glob("fourmin_trace.rank?.json"))) == 2, "ranks know the folder of rank 0"
    assert "torchrun has started this job again" in run.output, run.output
    assert re.search(f"goes on from {checkpoint}", run.output), run.output
    metrics = read_metrics(folder)
    assert metrics["train/loss"].steps.tolist() == list(range(36))
    (resumed,) = resumed_steps(metrics)
    assert resumed > 0
    assert resumed % 3 == 0


def test_rank_0_is_stopped_which_holds_the_store(tmp_path: Path) -> None:
    fault = "0:5:SIGSTOP:0"
    script = [restart.SCRIPT, "3", str(tmp_path), fault, "timeout_s=4", "stall_warning_s=1"]
    with running(script, tmp_path) as run:
        deadline = time.monotonic() + 180
        # Rank 0 is the script itself, and was started without a rank.
        while not (tmp_path / f"{fault}.done").exists() or run.processes("LOCAL_RANK="):
            assert run.process.poll() is None, run.output
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
        said = "it waits for rank 0; the store, which knows about the others, does not answer"
        assert f"has waited for more than 1 s; {said}" in run.output
        assert run.output.count("LostRankError: rank 0 is gone: the store of the process group") == 2, run.output
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.process.wait(60) != 0
        assert run.left() == []


def test_spawn_returns_fp32_masters(tmp_path: Path) -> None:
    script, spawn = (
        checksum([SCRIPT, name, "2", "2", "16-true"], tmp_path, world=2) for name in ("fourmin", "fourmin_spawn")
    )
    assert script == spawn


def test_spawned_ranks_train_the_same(tmp_path: Path) -> None:
    script, spawn = (checksum([SCRIPT, name, "2", "2"], tmp_path, world=2) for name in ("ddp", "fourmin_spawn"))
    assert script == spawn


def test_a_rank_may_take_longer_than_the_one_that_started_it(tmp_path: Path) -> None:
    with running([str(TESTS / "scripts" / "predict.py")], tmp_path) as run:
        assert run.process.wait(120) == 0, run.output
        assert run.left() == []
        assert sorted(re.findall(r"rank \d has predicted", run.output)) == [
            "rank 0 has predicted",
            "rank 1 has predicted",
        ]


@pytest.mark.parametrize("delay_s", range(12))
def test_ctrl_c_while_tuning(tmp_path: Path, delay_s: int) -> None:
    """From the first import on."""
    with running(["-m", "lightning_fourmin", "tune", "accelerator=cpu", "budget_s=100"], tmp_path) as run:
        time.sleep(1 + delay_s)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(60) in (130, -signal.SIGINT), run.output
        assert run.left() == []
        assert "Traceback" not in run.output or delay_s < 4


def test_a_spawned_rank_reads_the_same(tmp_path: Path) -> None:
    path = str(tmp_path)
    write_numbers(tmp_path, [9, 2, 12])
    arguments = [str(TESTS / "scripts" / "count.py"), path, str(tmp_path / "last.ckpt"), "fourmin_spawn"]
    lines = run_until(arguments, None)
    assert lines.pop() == "done\n"
    data = numbers_module(path, 2, num_workers=2)
    numbers = [" ".join(map(str, batch.tolist())) for batch in data.train_dataloader()]
    assert lines[: len(numbers)] == [f"step {step} 0 {batch}\n" for step, batch in enumerate(numbers, 1)]
