"""The examples, run as their readers run them."""

import io
import os
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from PIL import Image

from lightning_fourmin.runs.record import RunRecord
from tests.faults.test_launchers import free_port, running

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def test_cifar10_folders(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    one_each = [{"data": pixels[number : number + 1].reshape(1, -1), "labels": [number % 2]} for number in range(6)]
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    contents = dict(zip(names, one_each, strict=True)) | {"batches.meta": {"label_names": ["cat", "dog"]}}
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            member, data = tarfile.TarInfo(f"cifar-10-batches-py/{name}"), pickle.dumps(content)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    output_of(EXAMPLES / "cifar10_folders.py", tmp_path, "cifar.tar.gz", "out")
    files = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*.png")}
    cats, dogs = ([f"train/{name}/{number:04d}.png" for number in range(3)] for name in ("cat", "dog"))
    in_order = [cats[0], dogs[0], cats[1], dogs[1], cats[2], "test/dog/0000.png"]
    assert files.keys() == set(in_order)
    for name, image in zip(in_order, pixels, strict=True):
        assert np.array_equal(np.asarray(Image.open(files[name])), image.transpose(1, 2, 0))


def test_cifar10_folders_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no archive")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "cifar10_folders.py", "x", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "x is not CIFAR-10's archive for Python, or cannot be read" in done.stderr


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
