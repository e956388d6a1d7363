"""Defaults that stand both in the Hydra tree and in code are equal, and the tree names what users may name."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

import lightning_fourmin
from lightning_fourmin.cli.hydra_app import CONF
from lightning_fourmin.cli.plan import PlanOptions
from lightning_fourmin.cli.report import ReportOptions
from lightning_fourmin.cli.tune import TuneOptions
from lightning_fourmin.data.pack.pack import PackOptions
from lightning_fourmin.data.pack.verify import VerifyOptions

FILES = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
DELIBERATE = {
    "callbacks/default.yaml": (
        ("checkpoint.filename", "checkpoint.monitor", "checkpoint.mode", "checkpoint.enable_version_counter"),
        "keeps the best epoch, under one name",
        (
            *("last_checkpoint.filename", "last_checkpoint.monitor", "last_checkpoint.mode"),
            *("last_checkpoint.save_on_train_epoch_end", "last_checkpoint.enable_version_counter"),
        ),
        "keeps the last epoch, under one name",
    ),
    "data/cifar10.yaml": (("train_transform.scale",), "32 pixels leave no room for crops of 8 %"),
    "data/shards.yaml": (("num_workers",), "trainings of the command are long, and decode JPEG"),
    "logger/csv.yaml": (("csv.name", "csv.version"), "the run's folder is the logger's"),
    "logger/tensorboard.yaml": (("tensorboard.name", "tensorboard.version"), "a folder in that of the run"),
    "logger/wandb.yaml": (("wandb.project",), "runs of several experiments are in one project"),
    "model/classifier.yaml": (("model",), "each option of the group names its net"),
    "optim/lars.yaml": (("weight_decay",), "MLPerf's, as the rate"),
    "optim/sgd.yaml": (("lr", "momentum", "weight_decay", "nesterov"), "Goyal et al.'s"),
    "precision/bf16.yaml": (("dtype",), "the option is for BF16"),
    "trainer/default.yaml": (
        ("accelerator", "devices"),
        "one rank on the CPU, whatever the machine has: trainer=gpu takes the GPUs",
        ("max_epochs",),
        "Lightning would train 1,000 epochs, and warn",
        ("log_every_n_steps",),
        "Lightning's None is 50",
        ("num_sanity_val_steps",),
        "data is checked before the ranks start",
    ),
}
"""What differs from the default of a signature: by file, keys and the reason for those."""
VERBS = {
    "pack": PackOptions,
    "verify": VerifyOptions,
    "tune": TuneOptions,
    "plan": PlanOptions,
    "report": ReportOptions,
}
FROM_GROUPS = {"model", "model_options", "cluster"}
"""The options that config groups give."""
OF_THE_COMMAND = {"lightning_fourmin.cli.output.SweepReport"}
"""Targets that Hydra calls for `fourmin train` and nobody types."""


def targets(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, and where it stands."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield place, node
        for key, value in node.items():
            yield from targets(value, f"{place}{key}.")


def loaded(file: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONF / file))


def differing(target: str, options: dict[str, Any]) -> list[str]:
    """The options that are not what the signature has by default; those that come from elsewhere are left out."""
    parameters = inspect.signature(get_object(target)).parameters
    takes_more = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    found = []
    for name, value in options.items():
        if name not in parameters:
            assert takes_more, f"{target} has no {name}"
            continue
        default = parameters[name].default
        is_wired = isinstance(value, dict) or (isinstance(value, str) and "${" in value)
        if default is not inspect.Parameter.empty and not is_wired:
            default = list(default) if isinstance(default, tuple) else default
            if (value, type(value)) != (default, type(default)):
                found.append(name)
    return found


@pytest.mark.parametrize("file", FILES)
def test_defaults_in_yaml_equal_those_of_signatures(file: str) -> None:
    found = []
    for place, node in targets(loaded(file)):
        options = {key: value for key, value in node.items() if not key.startswith("_") and key != "defaults"}
        found += [f"{place}{name}" for name in differing(node["_target_"], options)]
    deliberate = [key for keys in DELIBERATE.get(file, ())[::2] for key in keys]
    assert sorted(found) == sorted(deliberate)


def test_the_checks_can_fail() -> None:
    assert set(DELIBERATE) <= set(FILES)
    target = "lightning_fourmin.LARS"
    assert differing(target, {"momentum": 0.9, "eps": 1e-7}) == []
    assert differing(target, {"momentum": 0.8, "nesterov": 0}) == ["momentum", "nesterov"]
    assert not is_public("lightning_fourmin.cli.output.SweepReport")
    assert not is_public("torch.optim._functional.sgd")
    assert is_public("lightning_fourmin.LARS")


@pytest.mark.parametrize("verb", VERBS)
def test_defaults_of_verbs_in_yaml_equal_those_in_code(verb: str) -> None:
    in_yaml, in_code = loaded(f"{verb}.yaml"), OmegaConf.to_container(OmegaConf.structured(VERBS[verb]))
    assert isinstance(in_code, dict)
    keys = (in_yaml.keys() | in_code.keys()) - {"hydra", "defaults"} - FROM_GROUPS
    assert {key for key in keys if in_yaml.get(key, "missing") != in_code.get(key, "missing")} == set()


def is_public(target: str) -> bool:
    """Whether users may name the target: an export of this package, or a name of Lightning or torch without `_`."""
    package, *names = target.split(".")
    if package == Path(lightning_fourmin.__file__).parent.name:
        return len(names) == 1 and names[0] in lightning_fourmin.__all__
    return package in ("lightning", "torch") and not any(name.startswith("_") for name in names)


@pytest.mark.parametrize("file", FILES)
def test_targets_are_public(file: str) -> None:
    named = {node["_target_"] for _, node in targets(loaded(file))}
    assert {target for target in named if not is_public(target)} <= OF_THE_COMMAND
