"""`fourmin train` as users run it: folders, sweeps, Ctrl-C and resume, and mistakes that end with a sentence."""

import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import nn

from lightning_fourmin import ImageClassifier
from lightning_fourmin.cli.output import outcome_lines
from lightning_fourmin.data.index import Index, Split
from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO
from lightning_fourmin.runs.folder import run_of
from lightning_fourmin.runs.metrics import read_metrics, resumed_steps
from tests.faults.test_launchers import Run, running
from tests.support.composing import composed
from tests.support.pages import Page
from tests.support.runs import RUN
from tests.support.shards import jpeg, write_shard

Fourmin = Callable[..., tuple[int, str, str]]
OLD_RUN = Path(__file__).parents[1] / "runs" / "old_run"
# One rank's work of a second or so.
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "trainer.log_every_n_steps=1", "data.num_workers=0"]


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def test_sweep(fourmin: Fourmin, tmp_path: Path) -> None:
    command = ["-m", "trainer.devices=1,2,0", "optim.lr=4", *SHORT]
    code, output, errors = fourmin("train", *command)
    # A failed job does not end the sweep, but the command says in the end that there was one.
    assert code == 1, errors
    assert "Traceback" not in output + errors
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    jobs = [record(sweep / str(number)) for number in range(3)]
    assert [job["status"] for job in jobs] == ["done", "done", "failed"]
    for job, devices in zip(jobs, (1, 2, 0), strict=True):
        assert job["overrides"][:2] == [f"trainer.devices={devices}", "optim.lr=4"]
        if not devices:
            assert job["error"] == "trainer.devices=0 must be a number of ranks, 1 or more"
            assert job["summary"]["top1"] is None
        else:
            assert job["world_size"] == job["summary"]["N"] == devices
            assert job["summary"]["steps"] == 3
            assert job["arithmetic"][0].startswith(f"Global batch: 32 a rank x {devices} rank")
    for number in range(3):
        assert (sweep / str(number) / "report.html").is_file()
        assert (sweep / str(number) / "config.yaml").is_file()
    assert (sweep / "1" / "checkpoints" / "best.ckpt").is_file()
    with (sweep / "sweep.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    for name in ("sweep.md", "report.html"):
        assert (sweep / name).is_file()
    assert "1 of 3 jobs failed" in errors
    # In its folder the sweep resumes: what is done stays, what failed is tried again. Scripts may add resume=true.
    in_folder = f"hydra.sweep.dir={sweep}"
    code, output, errors = fourmin("train", *command, in_folder)
    assert (code, "1 of 3 jobs failed" in errors) == (1, True), errors
    assert [record(sweep / str(number)) == job for number, job in enumerate(jobs)] == [True, True, False]
    assert "resume" not in (sweep / "sweep.md").read_text(), "no setting that jobs differ in"
    code, output, errors = fourmin("train", "-m", "trainer.devices=1,2,0", *SHORT, "resume=true", in_folder)
    assert (code, "holds the job `trainer.devices=1 optim.lr=4" in errors) == (1, True), errors


def test_a_sweep_that_cannot_go_on(fourmin: Fourmin, tmp_path: Path) -> None:
    job = tmp_path / "sweep" / "0"
    job.mkdir(parents=True)
    (job / "run.json").write_text("{}")
    command = ["-m", "optim.lr=4", "resume=true", "hydra.sweep.dir=sweep", "metric=accuracy"]
    code, output, errors = fourmin("train", *command)
    assert (code, "run.json has no field format" in errors) == (1, True), errors
    assert "Traceback" not in output + errors
    (job / "run.json").unlink()
    _, _, errors = fourmin("train", *command)
    assert "sweep has no jobs to go on with: the sweep begins" in errors


def test_a_sweep_from_a_checkpoint_goes_on_from_it(fourmin: Fourmin) -> None:
    """Without it, jobs that had not begun would begin with random weights, beside others that did not."""
    command = ["resume=nowhere", "optim.lr=4", "hydra.sweep.dir=sweep"]
    for _ in range(2):
        code, _, errors = fourmin("train", "-m", *command)
        assert (code, "job 0: resume=nowhere: nowhere does not exist" in errors) == (1, True), errors
    code, _, errors = fourmin("train", "-m", "resume=true", *command[1:])
    assert (code, "sweep/0 holds the job `resume=nowhere optim.lr=4`: give the sweep" in errors) == (1, True), errors


def test_a_sweep_with_a_metric_that_there_is_not(fourmin: Fourmin) -> None:
    code, output, errors = fourmin("train", "-m", "optim.lr=4,5", "metric=accuracy", *SHORT)
    assert code == 1
    assert "2 of 2 jobs failed:\n  job 0: metric=accuracy is not known" in errors
    assert "Traceback" not in output + errors


def end_all(run: Run, folder: Path, awaited: str, number: signal.Signals, delay_s: float = 0) -> float:
    """Signals every process of a run once a file is there: all end soon, with the exit code that shells have for it.

    Gives the time of the signal.
    """
    run.wait_until(lambda: list(folder.glob(awaited)))
    time.sleep(delay_s)
    signalled_s = time.time()
    os.killpg(run.process.pid, number)
    assert run.process.wait(60) == 128 + number, run.output
    assert run.left() == []
    assert "Traceback" not in run.output
    return signalled_s


def test_ctrl_c_and_resume(fourmin: Fourmin, tmp_path: Path) -> None:
    command = ["-m", "lightning_fourmin", "train", "trainer.max_epochs=1000", *SHORT[1:]]
    with running(command, tmp_path) as run:
        end_all(run, tmp_path, "runs/digits/*/checkpoints/last.ckpt", signal.SIGINT)
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    assert record(folder)["status"] == "interrupted"
    where = os.path.relpath(folder, tmp_path)
    assert (
        f"fourmin train: interrupted; the same command with `run_dir={where}` goes on after the last epoch"
        in run.output
    )
    num_epochs = record(folder)["summary"]["epochs"]
    code, output, errors = fourmin("train", "resume=true", f"trainer.max_epochs={num_epochs + 2}", *SHORT[1:])
    assert code == 0, errors
    (resumed,) = (path for path in (tmp_path / "runs" / "digits").iterdir() if path != folder)
    with (resumed / "metrics.csv").open() as file:
        epochs = {int(row["epoch"]) for row in csv.DictReader(file) if row["epoch"]}
    # Ctrl-C came some time after a checkpoint was written.
    assert max(epochs) == num_epochs + 1
    assert 0 < min(epochs) <= num_epochs
    assert "top-1" in output
    # The page shows the run from its beginning, in a folder that it has not begun in.
    metrics = read_metrics(resumed)
    assert metrics["train/loss"].steps.tolist() == list(range(3 * (num_epochs + 2)))
    assert resumed_steps(metrics) == [3 * min(epochs)]
    page = Page(resumed / "report.html")
    assert f"The run was resumed from a checkpoint after step {3 * min(epochs)}: dotted lines." in page.text


def test_sigterm_to_all_processes_saves_and_the_run_goes_on_in_its_folder(fourmin: Fourmin, tmp_path: Path) -> None:
    arguments = ["run_dir=run", "data.batch_size=2", "trainer.log_every_n_steps=1"]
    folder = tmp_path / "run"
    with running(["-m", "lightning_fourmin", "train", *arguments], tmp_path) as run:
        end_all(run, tmp_path, "run/metrics.csv", signal.SIGTERM)
        assert (
            "asked to end by SIGTERM; the same command with `run_dir=run` goes on after the last step that was saved"
            in run.output
        )
    assert record(folder)["status"] == "preempted"
    seconds = record(folder)["seconds"]
    num_steps = AtomicCheckpointIO().load_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
    assert 0 < num_steps < 1437 // 4, "in the middle of the first epoch"
    code, _, errors = fourmin("train", *arguments, f"trainer.max_steps={num_steps + 3}")
    assert code == 0, errors
    steps = read_metrics(folder)["train/loss"].steps.tolist()
    assert record(folder)["seconds"] > seconds + 1, "both parts"
    # The step after which it ended was saved, but not logged.
    assert steps == [*range(num_steps - 1), *range(num_steps, num_steps + 3)]
    assert f"after step {num_steps}: dotted lines." in Page(folder / "report.html").text


def test_the_same_command_resumes_in_its_folder(fourmin: Fourmin, tmp_path: Path) -> None:
    folder, command = tmp_path / "run", ["run_dir=run", "trainer.devices=1", *SHORT[1:]]
    code, _, errors = fourmin("train", *command, "trainer.max_epochs=1", "strategy.trace=true")
    assert code == 0, errors
    assert (folder / "fourmin_trace.json").is_file()
    assert "goes on from" not in errors
    first = record(folder)
    # What cannot begin leaves figures and time.
    code, _, errors = fourmin("train", *command, "global_batch=7")
    assert (code, "global_batch=7 is not a multiple" in errors) == (1, True)
    assert (record(folder)["status"], record(folder)["summary"]) == ("failed", first["summary"])
    # Nothing is left to do: figures and curves stay.
    code, output, errors = fourmin("train", *command, "trainer.max_epochs=1")
    assert code == 0, errors
    assert errors.count("goes on from run/checkpoints/last.ckpt (resume=false begins afresh)") == 1
    assert f"{first['summary']['top1']:.1%} top-1" in output
    for field in ("summary", "model", "arithmetic", "world_size"):
        assert record(folder)[field] == first[field]
    assert record(folder)["seconds"] > first["seconds"] + 1, "all parts"
    assert read_metrics(folder)["train/loss"].steps.tolist() == [0, 1, 2]
    code, _, errors = fourmin("train", *command, "trainer.max_epochs=2")
    assert code == 0, errors
    assert (record(folder)["summary"]["steps"], record(folder)["arithmetic"][2]) == (
        6,
        "Length: 2 epochs x 3 steps = 6 steps.",
    )
    assert read_metrics(folder)["train/loss"].steps.tolist() == [0, 1, 2, 3, 4, 5]
    code, _, errors = fourmin("train", *command, "trainer.max_epochs=1", "resume=false")
    assert code == 0, errors
    assert "goes on from" not in errors
    assert read_metrics(folder)["train/loss"].steps.tolist() == [0, 1, 2]
    assert (folder / "earlier-1" / "checkpoints" / "last.ckpt").is_file()


def test_a_run_that_resumes_another_has_its_settings_and_its_best(fourmin: Fourmin, tmp_path: Path) -> None:
    first = ["run_dir=first", "trainer.devices=1", *SHORT[1:], "optim.lr=4", "trainer.max_epochs=2"]
    code, _, errors = fourmin("train", *first)
    assert code == 0, errors
    code, output, errors = fourmin("train", "resume=first", "run_dir=second", "trainer.max_epochs=3")
    assert code == 0, errors
    assert "fourmin train: has the settings of first, but for trainer.max_epochs=3 (was 2)\n" in errors
    assert "dirpath has changed" not in output + errors
    config = OmegaConf.load(tmp_path / "second" / "config.yaml")
    assert (config.optim.lr, config.trainer.devices, config.trainer.max_epochs) == (4, 1, 3)
    metrics = read_metrics(tmp_path / "second")
    assert len(metrics["train/loss"].steps) == 9
    checkpoints = tmp_path / "second" / "checkpoints"
    saved = AtomicCheckpointIO().load_checkpoint(checkpoints / "last.ckpt")["callbacks"]
    (best,) = (state for state in saved.values() if str(state.get("best_model_path", "")).endswith("best.ckpt"))
    assert float(best["best_model_score"]) == pytest.approx(metrics["val/top1"].values.max())
    assert best["best_model_path"] == str(checkpoints / "best.ckpt")
    of_best = AtomicCheckpointIO().load_checkpoint(checkpoints / "best.ckpt")["global_step"]
    tops = dict(zip(metrics["val/top1"].steps, metrics["val/top1"].values, strict=True))
    assert tops[of_best - 1] == metrics["val/top1"].values.max()


def test_a_folder_of_an_earlier_version_resumes_and_reports(fourmin: Fourmin, tmp_path: Path) -> None:
    """tests/runs/old_run is what the version before the one rule of resuming has left: 6 steps in two parts."""
    folder, command = tmp_path / "old", ["run_dir=old", "model=resnet_small", "trainer.devices=1", *SHORT[1:]]
    code, _, errors = fourmin("train", *command, "trainer.max_epochs=2")
    assert code == 0, errors
    checkpoints = {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
    shutil.rmtree(folder)
    shutil.copytree(OLD_RUN, folder)
    (folder / "checkpoints").mkdir()
    for name, content in checkpoints.items():
        (folder / "checkpoints" / name).write_bytes(content)
    code, _, errors = fourmin("report", "run=old")
    assert code == 0, errors
    assert "The run was resumed from a checkpoint after step 3: dotted lines." in Page(folder / "report.html").text
    code, _, errors = fourmin("train", *command, "trainer.max_epochs=3")
    assert code == 0, errors
    assert read_metrics(folder)["train/loss"].steps.tolist() == list(range(9))
    assert resumed_steps(read_metrics(folder)) == [3, 6]
    assert record(folder)["seconds"] > record(OLD_RUN)["seconds"]
    assert sorted(path.name for path in (folder / "earlier-1").iterdir()) == ["metrics-1.csv"]


def test_checkpoints_that_cannot_be_loaded(fourmin: Fourmin, tmp_path: Path) -> None:
    short = [*SHORT[1:], "trainer.devices=1"]
    code, _, errors = fourmin("train", *short, "run_dir=runs/digits/first", "trainer.max_epochs=1")
    assert code == 0, errors
    last, best = (tmp_path / "runs" / "digits" / "first" / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    last.write_bytes(last.read_bytes()[:-100])
    photo, weights = tmp_path / "photo.ckpt", tmp_path / "weights.ckpt"
    photo.write_bytes(b"GIF89a")
    torch.save({"weight": torch.ones(2)}, weights)
    for path, message in (
        (last, "is not a whole checkpoint: cut short, damaged, or another kind of file; resume from another"),
        (photo, "is not a whole checkpoint"),
        (weights, "was not saved by a Trainer: it has no state_dict; resume from another"),
    ):
        code, output, errors = fourmin("train", *short, f"resume={path}")
        assert code == 1
        assert errors.startswith(f"fourmin train: {path} {message}")
        assert "Traceback" not in output + errors
    other = ["model=resnet_small"]
    code, output, errors = fourmin("train", *short, f"resume={best}", *other)
    assert code == 1
    assert f"fourmin train: {best} was saved by another model: Missing key(s) in state_dict: " in errors
    assert "Traceback" not in output + errors
    code, _, errors = fourmin("train", *short, "run_dir=runs/digits/second", "resume=true", "trainer.max_epochs=2")
    assert code == 0, errors
    relative = last.relative_to(tmp_path)
    assert errors.startswith(f"fourmin train: {relative} is not a whole checkpoint: ")
    assert resumed_steps(read_metrics(tmp_path / "runs" / "digits" / "second")) == [3]


def test_numbers_that_are_not_finite_end_a_run(fourmin: Fourmin) -> None:
    diverging = ["precision=fp32", "optim=sgd", "optim.lr=1e38", "trainer.limit_train_batches=8", "trainer.devices=1"]
    code, output, errors = fourmin("train", *diverging, "data.num_workers=0", "callbacks.preemption=null")
    assert code == 1
    assert "fourmin train: gradients are not finite at global_step " in errors
    assert "Traceback" not in output + errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lrr=1"], "Could not override 'optim.lrr': `fourmin train --help` lists the keys\n"),
        (["experimnt=digits"], "Could not override 'experimnt': `fourmin train --help` lists the keys\n"),
        (
            ["experiment=digit"],
            "experiment=digit is not known: did you mean digits?; experiment is one of cifar10_alex",
        ),
        (["model=alexnet"], "model=alexnet is not known: did you mean alexnet_bn?; model is one of alexnet_bn, "),
        (["data=shards"], "data.path: not given"),
        (
            ["data=cifar10"],
            "data=cifar10, but image size, rate and length would be those of the demo, experiment=digits:",
        ),
        (
            ["data=cifar10", "experiment=none"],
            "shards/cifar10/index.json does not exist: pack the shards with `fourmin",
        ),
        (["~experiment"], "name is not given: write experiment=none instead of ~experiment, or name=NAME"),
        (["trainer.devices=0"], "trainer.devices=0 must be a number of ranks, 1 or more"),
        (
            ["trainer=torchrun"],
            "trainer.devices: trainer=torchrun takes it from the launcher; start the ranks with torchrun or srun, as",
        ),
        (["global_batch=100"], "global_batch=100 is not a multiple of the 32 a rank x 2 ranks = 64 samples of one"),
        (
            ["global_batch=64", "~data.batch_size"],
            "global_batch=64 needs to know data.batch_size: set it, or global_batch=null",
        ),
        (["resume=true"], "resume=true, but no run in runs/digits has a checkpoint: train without resume first"),
        (
            ["resume=nowhere"],
            "resume=nowhere: nowhere does not exist; give the folder of a run, or true for the newest",
        ),
        (["resume=3"], "resume=3: 3 does not exist; give the folder of a run, or true for the newest"),
        (["data.batch_size=0"], "batch_size=0 must be at least 1"),
        (["data.batch_size=abc"], "batch_size='abc' must be a whole number"),
        (["global_batch=abc"], "global_batch=abc is not a multiple of the 32 a rank x 2 ranks = 64 samples of one"),
        (["-m", "hydra.sweep.subdir=job"], "hydra.sweep.subdir must be ${hydra.job.num}: reports and resumed sweeps"),
        (["metric=accuracy"], "metric=accuracy is not known"),
        (["seed=null"], "seed=None must be a whole number from 0 to 4294967295"),
        (["seed=-1"], "seed=-1 must be a whole number from 0 to 4294967295"),
        (["data.path=shards/mine"], "data.path=shards/mine, but image size, rate and length would be those of the"),
        (["data.train_split=trian"], "digits has no split 'trian' (it has train, val): choose one of these"),
        (["data.val_split=test"], "digits has no split 'test' (it has train, val): choose one of these"),
        (["logger=null"], "Config group override must be a string or a list. Got NoneType: a group is left out with ~"),
        (["-m", "optim.lrr=1,2"], "Could not override 'optim.lrr': `fourmin train --help` lists the keys\n"),
        (["trainer.num_nodes=2"], "trainer.num_nodes=2, but this command starts ranks on one machine: start it with"),
    ],
)
def test_mistakes_end_with_a_sentence(fourmin: Fourmin, arguments: list[str], message: str) -> None:
    code, output, errors = fourmin("train", *arguments)
    assert code == 1
    assert errors.startswith(f"fourmin train: {message}")
    assert "Traceback" not in output + errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lr=-1"], "lr of param group 0 must be a finite number of at least 0, got -1"),
        (["optim.lr=0"], "the optimizer's lr=0 must be above 0: the schedule multiplies it"),
        (["schedule.warmup_epochs=-1"], "warmup_epochs=-1 must be at least 0"),
        (["strategy.algorithm=tree"], "algorithm='tree' is not known: choose one of "),
        (["strategy.fusion_mb=0"], "fusion_mb must be a number above 0, got 0"),
        (["precision.loss_scale=-1"], "loss_scale"),
    ],
)
def test_options_are_checked_before_ranks_start(
    fourmin: Fourmin, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, output, errors = fourmin("train", *arguments, "run_dir=run")
    assert code == 1
    assert errors.startswith(f"fourmin train: {message}"), errors
    assert "Traceback" not in output + errors
    # A rank's traceback would begin with the rank.
    assert (tmp_path / "run" / "error.txt").read_text().startswith("Traceback")


def test_images_of_the_users_own(fourmin: Fourmin, tmp_path: Path) -> None:
    """As the guide has it: small grey images in folders of classes, packed, trained on, without a recipe."""
    for number in range(40):
        folder = tmp_path / "mine" / ("dark" if number % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        grey = np.full((14, 14), 40 if number % 2 else 200, np.uint8)
        Image.fromarray(grey + np.arange(14, dtype=np.uint8)).save(folder / f"{number}.png")
    for split in ("train", "val"):
        code, _, errors = fourmin("pack", "src=mine", "out=shards/mine", f"split={split}", "num_workers=1")
        assert code == 0, errors
    own = ["experiment=none", "data=shards", "data.path=shards/mine", "data.batch_size=8", "data.num_workers=0"]
    code, _, errors = fourmin("train", *own, "model=resnet50")
    assert (code, "data.image_size=14, but model=resnet50 takes images of 32 pixels or more" in errors) == (1, True)
    rates = ["model=resnet_small", "optim.lr=2", "trainer.devices=1", "trainer.max_epochs=2", "run_dir=run"]
    code, output, errors = fourmin("train", *own, *rates)
    assert code == 0, errors
    assert "fourmin train: data.image_size=14, from the index; augment=none\n" in errors
    assert "A rate of 2 from the first step on often makes a training diverge" in output + errors
    assert record(tmp_path / "run")["name"] == "mine"
    assert "top-1" in output


def test_a_folder_that_another_run_writes_to(fourmin: Fourmin, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        code, output, errors = fourmin("train", "run_dir=run", *SHORT)
    finally:
        os.close(folder)
    assert (code, output) == (1, "")
    assert errors.startswith("fourmin train: another run writes to ")
    assert not (tmp_path / "run" / "run.json").exists()


class Whole(ImageClassifier):
    """Keeps its net among its hyperparameters, as modules of users do."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.save_hyperparameters("model")


def test_a_module_of_the_users_own_in_a_folder_that_was_used(fourmin: Fourmin, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").write_text("of another run")
    net = "model.model={_target_:lightning_fourmin.models.build_model,name:resnet_small,num_classes:10}"
    own = ["run_dir=run", "model._target_=tests.cli.test_train.Whole", net, "~model.model_options", "trainer.devices=1"]
    code, _, errors = fourmin("train", *own, *SHORT, "resume=false")
    assert code == 0, errors
    assert record(tmp_path / "run")["model"]["name"] == "Whole"
    assert (tmp_path / "run" / "earlier-1" / "checkpoints" / "last.ckpt").read_text() == "of another run"
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=False)["global_step"] == 3
    again = [*own, *SHORT[1:], "trainer.max_epochs=2"]
    code, _, errors = fourmin("train", *again)
    assert code == 1
    assert "if you trust the file, pass weights_only=False to the Trainer's method (weights_only=false to" in errors
    code, _, errors = fourmin("train", *again, "weights_only=false")
    assert code == 0, errors
    assert record(tmp_path / "run")["summary"]["steps"] == 6


def test_a_module_in_the_folder_of_the_command(fourmin: Fourmin, tmp_path: Path) -> None:
    (tmp_path / "found_here.py").write_text("from lightning_fourmin import ImageClassifier\n\nOwn = ImageClassifier\n")
    options = ["run_dir=run", "model._target_=found_here.Own", "trainer.devices=1", *SHORT]
    code, _, errors = fourmin("train", *options)
    assert code == 0, errors


def test_the_last_checkpoint_is_that_of_the_last_epoch(fourmin: Fourmin, tmp_path: Path) -> None:
    """Also where that is not the best: here the lower the epoch the better."""
    best = ["callbacks.checkpoint.monitor=epoch", "callbacks.checkpoint.mode=min"]
    code, _, errors = fourmin("train", *best, "run_dir=run", "trainer.devices=1", "trainer.max_epochs=3", *SHORT[1:])
    assert code == 0, errors
    files = {path.stem: AtomicCheckpointIO().load_checkpoint(path) for path in (tmp_path / "run").rglob("*.ckpt")}
    assert {name: content["global_step"] for name, content in files.items()} == {"best": 3, "last": 9}


def test_classes_are_told_where_the_index_names_none(fourmin: Fourmin, tmp_path: Path) -> None:
    samples = [{"__key__": f"{number}", "jpg": jpeg(10, 10, number), "cls": number % 3} for number in range(8)]
    split = Split((write_shard(tmp_path / "some-0.tar", samples),), None)
    Index((), {"train": split, "val": split}).write(tmp_path)
    data = ["data=shards", f"data.path={tmp_path}", "data.image_size=8", "data.batch_size=4"]
    arguments = ["experiment=none", *data, "run_dir=run", "trainer.devices=1", *SHORT]
    code, _, errors = fourmin("train", *arguments, "+model.num_classes=3")
    assert code == 0, errors
    weights = AtomicCheckpointIO().load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["state_dict"]
    assert len(weights["net.fc8.bias"]) == 3


def test_what_is_said_to_go_on_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "lr=1,2 it's"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    (line,) = outcome_lines(replace(RUN, status="interrupted", overrides=()), folder)
    (typed,) = re.findall("`(.+)`", line)
    assert "the same command with " in line
    (afresh,) = outcome_lines(replace(RUN, status="interrupted", command="fourmin train resume=False"), folder)
    assert "the same command without resume=false and with " in afresh
    config = composed(*shlex.split(typed))
    assert config.run_dir == "lr=1,2 it's"


@pytest.mark.parametrize("number", [0, 1])
def test_a_sweep_is_told_to_go_on_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Not with the folder of the job that was running: the others would stay as they are."""
    monkeypatch.chdir(tmp_path)
    record = replace(RUN, status="interrupted", overrides=("optim.lr=4",))
    (line,) = outcome_lines(record, tmp_path / "some" / "sweep" / str(number))
    assert "the same command with `hydra.sweep.dir=some/sweep` goes on" in line


@pytest.mark.parametrize("name", ["checkpoints/last.ckpt", "hpc_ckpt_1.ckpt"])
def test_the_run_that_has_saved_a_checkpoint(tmp_path: Path, name: str) -> None:
    assert run_of(str(tmp_path / name)) is None
    (tmp_path / "run.json").touch()
    assert run_of(str(tmp_path / name)) == tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(fourmin: Fourmin) -> None:
    code, _, errors = fourmin("train", "trainer=gpu")
    assert code == 1
    assert errors.startswith(
        "fourmin train: trainer.devices=-1: GPUs requested but none are available. Without GPUs use"
    )


def test_missing_shards_say_how_to_pack_them(fourmin: Fourmin) -> None:
    _, _, errors = fourmin("train", "experiment=cifar10_alexnet")
    assert "`fourmin pack src=FOLDER out=shards/cifar10 split=train`, then the same with split=val" in errors


def test_help_lists_groups_and_keys(fourmin: Fourmin) -> None:
    code, output, _ = fourmin("train", "--help")
    assert code == 0
    assert output.startswith("fourmin train is powered by Hydra.")
    assert "experiment: cifar10_alexnet, cifar10_resnet, digits, imagenet_alexnet_64k" in output
