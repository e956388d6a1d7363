"""The rule by which a training resumes: a folder with checkpoints does, a new one begins, `resume` names another."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fourmin.errors import CheckpointError, ConfigError
from lightning_fourmin.faults.checkpoint_io import AtomicCheckpointIO
from lightning_fourmin.runs.folder import checkpoint_to_resume, saved, settings_that_differ, with_settings_of_run
from tests.support.runs import RUN


def save(path: Path, age_s: int, whole: bool = True) -> Path:
    """A checkpoint that was saved some seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if whole:
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)
    else:
        path.write_text("cut short")
    seconds = 1_800_000_000 - age_s
    os.utime(path, (seconds, seconds))
    return path


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Two runs with checkpoints, the newer one with the lower number."""
    for name, age_s in (("1", 10), ("2", 100)):
        save(tmp_path / name / "checkpoints" / "best.ckpt", age_s + 5)
        save(tmp_path / name / "checkpoints" / "last.ckpt", age_s)
        RUN.write(tmp_path / name)
    return tmp_path


def test_a_folder_with_checkpoints_resumes_and_a_new_one_begins(experiment: Path) -> None:
    own = experiment / "2" / "checkpoints" / "last.ckpt"
    for resume in (None, True, str(experiment / "2"), str(experiment / "1"), 1, "nowhere"):
        assert checkpoint_to_resume(resume, experiment / "2") == own, resume
    assert checkpoint_to_resume(False, experiment / "2") is None
    assert checkpoint_to_resume(None, experiment / "new") is None
    assert checkpoint_to_resume(False, experiment / "new") is None


def test_another_run_or_checkpoint_is_named(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(experiment)
    new, newest = experiment / "new", experiment / "1" / "checkpoints" / "last.ckpt"
    assert checkpoint_to_resume(True, new) == newest
    assert checkpoint_to_resume(2, new) == Path("2/checkpoints/last.ckpt")
    best = experiment / "2" / "checkpoints" / "best.ckpt"
    assert checkpoint_to_resume(str(best), new) == best
    # One of the folder's own need not be the newest.
    assert checkpoint_to_resume(str(best), experiment / "2") == best
    assert checkpoint_to_resume("2/checkpoints/best.ckpt", experiment / "2") == Path("2/checkpoints/best.ckpt")
    with pytest.raises(ConfigError, match="resume=nowhere: nowhere does not exist; give the folder of a run"):
        checkpoint_to_resume("nowhere", new)
    (experiment / "empty").mkdir()
    with pytest.raises(ConfigError, match="resume=empty: empty/checkpoints is empty; give the folder of a run"):
        checkpoint_to_resume("empty", new)
    with pytest.raises(ConfigError, match=r"resume=true, but no run in .*/1 has a checkpoint: train without resume"):
        checkpoint_to_resume(True, experiment / "1" / "new")


def test_what_a_folder_resumes_from_is_said(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_to_resume(None, experiment / "2")
    assert capsys.readouterr().err == (
        f"fourmin train: goes on from {experiment}/2/checkpoints/last.ckpt (resume=false begins afresh)\n"
    )
    checkpoint_to_resume(str(experiment / "1"), experiment / "2")
    said = capsys.readouterr().err
    assert f"{experiment}/2 has checkpoints of its own: resume={experiment}/1 counts where it has none" in said
    checkpoint_to_resume(str(experiment / "1"), experiment / "new")
    assert capsys.readouterr().err == f"fourmin train: goes on from {experiment}/1/checkpoints/last.ckpt\n"


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, last = (save(tmp_path / "checkpoints" / f"{name}.ckpt", 10) for name in ("best", "last"))
    by_slurm = save(tmp_path / "hpc_ckpt_1.ckpt", 60)
    assert saved(tmp_path) == [last, best, by_slurm]
    # Lightning's own handler saves nothing but this one.
    save(by_slurm, 0)
    assert checkpoint_to_resume(None, tmp_path) == by_slurm
    save(by_slurm, 0, whole=False)
    assert checkpoint_to_resume(None, tmp_path) == last
    assert "hpc_ckpt_1.ckpt is not a whole checkpoint" in capsys.readouterr().err
    for path in (best, last):
        save(path, 10, whole=False)
    with pytest.raises(CheckpointError, match=r"resume from another \(resume=false begins afresh\)$"):
        checkpoint_to_resume(None, tmp_path)
    assert checkpoint_to_resume(False, tmp_path) is None


def test_a_job_that_slurm_has_queued_again_resumes_whatever_its_command_says(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    own, other = (experiment / name / "checkpoints" / "last.ckpt" for name in ("2", "1"))
    best = own.with_name("best.ckpt")
    for resume in (None, True, False, str(experiment / "1"), str(best)):
        assert checkpoint_to_resume(resume, experiment / "2") == own, resume
    assert capsys.readouterr().err.count("SLURM has queued this job again\n") == 5
    assert checkpoint_to_resume(str(experiment / "1"), experiment / "new") == other
    assert checkpoint_to_resume(None, experiment / "new") is None
    assert "queued this job again: it begins afresh, " in capsys.readouterr().err


# The settings of the run that is resumed.


def test_a_command_has_the_settings_of_the_run_that_it_resumes(experiment: Path) -> None:
    replace(RUN, arguments=("optim.lr=4", "+trainer.x=[1,2]", "run_dir=old", "hydra.verbose=1")).write(experiment / "1")
    of_run = ["optim.lr=4", "+trainer.x=[1,2]"]
    for named in (f"resume={experiment}/1", f"resume={experiment}/1/checkpoints/best.ckpt", f"run_dir={experiment}/1"):
        assert with_settings_of_run([named]) == [*of_run, named]
    named = f"resume={experiment}/1"
    assert with_settings_of_run([named, "trainer.x=[3]"]) == ["optim.lr=4", named, "trainer.x=[3]"]
    assert with_settings_of_run(["optim.lr=2", named, "~trainer.x"]) == ["optim.lr=2", named, "~trainer.x"]
    assert with_settings_of_run([named, f"run_dir={experiment}/new"]) == [*of_run, named, f"run_dir={experiment}/new"]
    # Checkpoints of its own come first.
    assert with_settings_of_run([named, f"run_dir={experiment}/2"])[0] == "optim.lr=2"


def test_other_commands_have_their_own_settings(experiment: Path) -> None:
    for arguments in (
        [],
        ["optim.lr=2"],
        [f"run_dir={experiment}/new"],
        [f"run_dir={experiment}/1", "resume=false"],
        ["resume=true"],
        ["resume=nowhere"],
        ["-m", f"resume={experiment}/1", "optim.lr=1,2"],
        ["--help"],
        [f"resume={experiment}/1", "optim.lr='"],
    ):
        assert with_settings_of_run(arguments) == arguments


def test_a_run_of_the_first_version_has_its_command(experiment: Path) -> None:
    replace(RUN, command="fourmin train experiment=none 'name=a b' run_dir=old").write(experiment / "1")
    assert with_settings_of_run([f"run_dir={experiment}/1"]) == [
        "experiment=none",
        "name=a b",
        f"run_dir={experiment}/1",
    ]


def test_what_differs_is_said_without_the_folders() -> None:
    before = {"run_dir": "runs/1", "resume": None, "trainer": {"max_epochs": 20, "x": 1}, "to": "runs/1/checkpoints"}
    now = {"run_dir": "runs/2", "resume": "runs/1", "trainer": {"max_epochs": 40, "y": 2}, "to": "runs/2/checkpoints"}
    assert settings_that_differ(before, now) == [
        "trainer.max_epochs=40 (was 20)",
        "trainer.y=2 (was not set)",
        "trainer.x=not set (was 1)",
    ]
    assert settings_that_differ(before, before) == []
