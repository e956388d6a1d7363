"""examples/slurm.sh where `srun` and `scontrol` are stand-ins that do to processes what SLURM does."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO
from lightning_fourmin.runs.metrics import read_metrics
from lightning_fourmin.runs.record import RunRecord
from tests.faults.test_launchers import TESTS, Run, running

JOB = f"{os.getpid() % 10_000:04}"
"""Lightning takes the port from it."""
TIMEOUT_S = 180.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script for digits on CPU, and the environment of its job."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "srun": f'exec "{sys.executable}" "{TESTS / "scripts" / "srun.py"}" "$@"',
        "scontrol": f'echo "$@" >> "{tmp_path}/scontrol.txt"',
        "fourmin": f'exec "{sys.executable}" -m lightning_fourmin "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"NNODES": 2, "NTASKS_PER_NODE": 1, "JOB_ID": JOB, "JOB_NAME": "fourmin"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    script = tmp_path / "slurm.sh"
    text = (TESTS.parent / "examples" / "slurm.sh").read_text()
    script.write_text(text.replace("imagenet_resnet50_8k", "digits").replace("accelerator=gpu", "accelerator=cpu"))
    return script


def warn(run: Run, metrics: Path) -> None:
    """Warns all processes of the tasks, as SLURM does before the time is up, once steps are logged."""
    run.wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3)
    for process in run.processes("SLURM_PROCID="):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)


def test_job_is_queued_again_and_goes_on(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["-c", "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])", str(job)]
    arguments += ["data.batch_size=4", "trainer.log_every_n_steps=1", "trainer.max_epochs=1"]
    folder = tmp_path / "runs" / "digits" / f"slurm-{JOB}"
    with running(arguments, tmp_path) as run:
        warn(run, folder / "metrics.csv")
        assert run.process.wait(TIMEOUT_S) == 143, run.output
        assert run.left() == []
        assert "asked to end by SLURM: saved " in run.output
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {JOB}\n"
    assert RunRecord.read(folder).status == "preempted"
    last = AtomicCheckpointIO().load_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
    assert 0 < last < 1437 // 8
    assert AtomicCheckpointIO().load_checkpoint(folder / "hpc_ckpt_1.ckpt")["global_step"] == last

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with running(arguments, tmp_path) as run:
        assert run.process.wait(TIMEOUT_S) == 0, run.output
        assert run.left() == []
        assert run.output.count("SLURM has queued this job again") == 1
        assert run.output.count(f"goes on from runs/digits/slurm-{JOB}/hpc_ckpt_1.ckpt") == 1
    record = RunRecord.read(folder)
    assert (record.status, record.world_size, record.summary.steps) == ("done", 2, 1437 // 8)
    assert record.topology is not None
    assert "2 nodes" in record.topology
    assert read_metrics(folder)["train/loss"].steps.tolist() == [*range(last - 1), *range(last, 1437 // 8)]
