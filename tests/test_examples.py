"""The examples, run as their readers run them."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_fourmin.report.run_files import RunRecord
from test_launchers import free_port, running

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT_S = 180.0


def output_of(script: Path, directory: Path, *arguments: str) -> str:
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plug_in(tmp_path: Path) -> None:
    output = output_of(EXAMPLES / "plug_in.py", tmp_path)
    (accuracy,) = re.findall(r"validation accuracy ([\d.]+)% with 2 ranks", output)
    assert float(accuracy) > 90


def test_own_hydra_app_composes_our_groups() -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(EXAMPLES / "own_hydra_app" / "conf"), version_base="1.3"):
        config = compose("config", ["optim=sgd", "data=cifar10"])
    assert config.optim._target_ == "torch.optim.SGD"
    assert config.data.path == "shards/cifar10"
    assert config.strategy.start_method == "spawn"


def test_own_hydra_app_trains(tmp_path: Path) -> None:
    output = output_of(EXAMPLES / "own_hydra_app" / "app.py", tmp_path, "max_epochs=1", "data.num_workers=0")
    assert re.search(r"validation accuracy [\d.]+% with 2 ranks", output)


def test_torchrun_with_two_nodes(tmp_path: Path) -> None:
    """The two commands at the end of torchrun.md, with one rank a node to be quick."""
    blocks = re.findall(r"```\n(.*?)```", (EXAMPLES / "torchrun.md").read_text(), re.DOTALL)
    commands = blocks[-1].replace("\\\n", " ").strip().splitlines()
    port = str(free_port())
    with ExitStack() as stack:
        runs = []
        for node, command in enumerate(commands):
            launcher, *arguments = shlex.split(command)
            assert launcher == "torchrun"
            assert arguments[arguments.index("--node_rank") + 1] == str(node)
            arguments[arguments.index("--nproc_per_node") + 1] = "1"
            arguments[arguments.index("--master_port") + 1] = port
            arguments += ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "data.num_workers=0"]
            directory = tmp_path / f"node{node}"
            directory.mkdir()
            runs.append(stack.enter_context(running(["-m", "torch.distributed.run", *arguments], directory)))
        for run in runs:
            assert run.process.wait(TIMEOUT_S) == 0, "\n".join(run.output for run in runs)
            assert run.left() == []
    (folder,) = (tmp_path / "node0" / "runs" / "digits").iterdir()
    record = RunRecord.read(folder)
    assert record.status == "done"
    assert record.world_size == 2
    assert record.topology is not None
    assert "2 nodes" in record.topology
    assert record.arithmetic[0] == "Global batch: 32 a rank x 2 ranks = 64."
    assert "top-1" in runs[0].output
    # Rank 0 alone writes and speaks.
    assert not (tmp_path / "node1" / "runs").exists()
    assert "top-1" not in runs[1].output
