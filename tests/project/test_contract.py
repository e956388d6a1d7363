"""The contract of the package: its public names, its layers, the packages that each may use, the price of an import."""

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import lightning_fourmin as fm
from tests.support.source import FILES, REPO, imported

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

PUBLIC_NAMES = [
    "LARS",
    "CosineSchedule",
    "DataMonitor",
    "EvalImage",
    "FiniteCheck",
    "FourMinError",
    "FourMinPrecision",
    "FourMinStrategy",
    "ImageClassifier",
    "PolySchedule",
    "PreemptionCheckpoint",
    "Sample",
    "ScalingMonitor",
    "ShardDataModule",
    "StepSchedule",
    "TrainImage",
    "TrustRatioMonitor",
    "param_groups",
]
NAMES_OF_DATA = {"EvalImage", "ImageClassifier", "Sample", "ShardDataModule", "TrainImage"}
"""Those that need the extra [data]."""

LAYERS = (
    ("errors", "text", "files", "_lightning", "faults", "allreduce", "precision", "optim", "strategy", "callbacks"),
    ("data", "models"),
    ("svg", "tune", "simulate", "runs", "report", "cli"),
)
"""The rooms of each layer; a room imports only those that stand before it, in its own layer and in those above."""
EXTRAS = ((), ("data",), ("data", "app"))
"""The extras that each layer needs."""
ENTRIES = {"__init__", "__main__", "app", "conf"}
"""Files at the top that stand for a room: the contract, the command line under other names, the tree of configs."""

OPTIONAL_IMPORTS = {
    # The errors say what to install.
    "data/digits.py": {"sklearn"},
    # Packing is a command.
    "data/pack/process_pool.py": {"rich"},
}
"""Imports of packages that the extras of a layer do not bring, with the reason."""


def room_of(name: str) -> str:
    """The room of a file, or of a module below the package."""
    first = re.split(r"[./]", name.removesuffix(".py"))[0]
    return first


def layer_of(file: str) -> int:
    """The layer of a file: a number into `LAYERS`. The files at the top belong to the last one that they import."""
    for layer, rooms in enumerate(LAYERS):
        if room_of(file) in rooms:
            return layer
    return 0 if file in ("__init__.py", "conf.py") else len(LAYERS) - 1


# Public names.


def test_public_names() -> None:
    assert fm.__all__ == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(fm))
    assert all(getattr(fm, name).__name__ == name for name in PUBLIC_NAMES)
    seen = {name for name, value in vars(fm).items() if not isinstance(value, ModuleType)}
    assert {name for name in seen if not name.startswith("_")} == set(PUBLIC_NAMES)


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match=r"^module 'lightning_fourmin' has no attribute 'Strategy'$"):
        fm.Strategy  # noqa: B018
    assert not hasattr(fm, "__wrapped__")


# Layers.


def test_every_file_has_a_room() -> None:
    rooms = {room for layer in LAYERS for room in layer} | ENTRIES
    assert {room_of(file) for file in FILES} <= rooms


def test_rooms_import_only_what_stands_before_them() -> None:
    order = [room for layer in LAYERS for room in layer]
    against = defaultdict(list)
    for file in FILES:
        if room_of(file) in ENTRIES:
            continue
        for name in imported(file):
            package, _, inner = name.partition(".")
            # The contract itself stands between the second layer and the third.
            other = room_of(inner) if inner else "data"
            if package != "lightning_fourmin" or other == room_of(file) or other == "conf":
                continue
            if order.index(other) > order.index(room_of(file)):
                against[f"{room_of(file)} -> {other}"].append(f"{file} imports {name}")
    assert not against, dict(against)


# Packages.


def distribution_name(name: str) -> str:
    return name.lower().replace("_", "-")


def requirements(*extras: str) -> list[Requirement]:
    """What pyproject.toml declares for the package with extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [one for one in map(Requirement, lines) if one.name != PROJECT["name"]]


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_what_is_imported_is_declared(layer: int) -> None:
    declared = {distribution_name(one.name) for one in requirements(*EXTRAS[layer])}
    distributions = packages_distributions()
    missing = defaultdict(set)
    for file in FILES:
        if layer_of(file) == layer:
            tops = {name.partition(".")[0] for name in imported(file)}
            for top in tops - set(sys.stdlib_module_names) - {"lightning_fourmin"}:
                if not declared & {distribution_name(name) for name in distributions[top]}:
                    missing[file].add(top)
    assert missing == {file: tops for file, tops in OPTIONAL_IMPORTS.items() if layer_of(file) == layer}


def test_extras_stand_on_each_other() -> None:
    extras = PROJECT["optional-dependencies"]
    assert "lightning-fourmin[data]" in extras["app"]
    assert "lightning-fourmin[app]" in extras["demo"]
    assert "lightning-fourmin[demo]" in extras["dev"]


# Imports in processes of their own.


def all_required(wanted: Iterable[Requirement]) -> set[str]:
    """The installed distributions that pip would install for these, and those that they require in turn."""
    found: set[tuple[str, str]] = set()
    pending = [(distribution_name(one.name), extra) for one in wanted for extra in ("", *one.extras)]
    while pending:
        if (asked := pending.pop()) in found:
            continue
        name, extra = asked
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            # Packages of a GPU are not installed beside the CPU build of torch.
            continue
        found.add(asked)
        for one in map(Requirement, lines):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                pending += [(distribution_name(one.name), inner) for inner in ("", *one.extras)]
    return {name for name, _ in found}


class Site:
    """A folder with links to some of the installed packages: all that a Python finds beside its own library."""

    def __init__(self, folder: Path, *extras: str) -> None:
        self.folder = folder
        folder.mkdir()
        for name in (*all_required(requirements(*extras)), PROJECT["name"]):
            installed = distribution(name)
            tops = {file.parts[0] for file in installed.files or () if file.suffix != ".pth"}
            for top in tops - {"..", "__pycache__"}:
                if not (link := folder / top).exists():
                    link.symlink_to(Path(str(installed.locate_file(top))).absolute())

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python without the packages that are not in the folder."""
        return subprocess.run(
            [sys.executable, "-S", "-P", "-W", "ignore", *arguments],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{self.folder}:{REPO}", "GLOO_SOCKET_IFNAME": "lo"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def script(self, text: str) -> str:
        """What a script prints that must not fail."""
        path = self.folder / "script.py"
        path.write_text(text)
        done = self.python(str(path))
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def core_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("core") / "site")


@pytest.fixture(scope="module")
def data_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("data") / "site", "data")


TRAINING = """
import lightning_fourmin as fm
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return fm.LARS(fm.param_groups(self, weight_decay=1e-4), lr=0.1)


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(80, 8), torch.arange(80) % 2), batch_size=4)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="fourmin_spawn",
        precision="16-true",
        max_epochs=1,  # long enough for the loss scale to come down from where FP16 overflows
        callbacks=[fm.ScalingMonitor(), fm.FiniteCheck()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    before = module.net[0].weight.clone()
    trainer.fit(module, data)
    assert not torch.equal(module.net[0].weight, before)
    print("trained")
"""


def test_the_plug_in_trains_without_the_extras(core_site: Site) -> None:
    assert {"torch", "lightning", "numpy"} <= {path.name for path in core_site.folder.iterdir()}
    absent = {"hydra", "matplotlib", "omegaconf", "PIL", "rich", "simplejpeg", "sklearn", "webdataset"}
    assert not absent & {path.name for path in core_site.folder.iterdir()}
    assert core_site.script(TRAINING).endswith("trained\n")


def test_names_that_need_an_extra_say_so(core_site: Site) -> None:
    asked = f"""
import lightning_fourmin as fm
for name in {sorted(NAMES_OF_DATA)}:
    try:
        getattr(fm, name)
    except ImportError as error:
        print(error)
"""
    said = core_site.script(asked).splitlines()
    # Samples are bytes and arrays, and torchmetrics comes with Lightning.
    needing = sorted(NAMES_OF_DATA - {"Sample", "ImageClassifier"})
    assert said == [f"{name} needs the extra [data]: pip install 'lightning-fourmin[data]'" for name in needing]


def test_the_command_line_says_which_extra_it_needs(core_site: Site) -> None:
    done = core_site.python("-m", "lightning_fourmin", "train")
    assert (done.returncode, done.stdout) == (1, "")
    missing = "hydra, matplotlib, omegaconf, PIL, rich, simplejpeg, webdataset"
    assert done.stderr == (
        f"fourmin train needs the extra [app] (not installed: {missing}): pip install 'lightning-fourmin[app]'\n"
    )


def test_the_second_layer_needs_no_more_than_its_extra(data_site: Site) -> None:
    names = ["lightning_fourmin." + file.removesuffix(".py").replace("/", ".") for file in FILES if layer_of(file) == 1]
    importing = f"""
import importlib, json
failed = {{}}
for name in {names}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name
print(json.dumps(failed))
"""
    failed = json.loads(data_site.script(importing))
    # Packing shows its progress with Rich.
    assert set(failed.values()) == {"rich"}
    assert all(name.startswith("lightning_fourmin.data.pack.") for name in failed)


LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def modules_after(statement: str) -> set[str]:
    """The modules that are loaded in a fresh process after a statement."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{statement}; {LOADED}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_the_plug_in_alone() -> None:
    more = modules_after("import lightning_fourmin") - modules_after("import lightning")
    tops = {name.partition(".")[0] for name in more}
    assert tops - set(sys.stdlib_module_names) <= {"lightning", "lightning_fourmin", "torch"}
    rooms = {room_of(name.partition(".")[2]) for name in more if name.startswith("lightning_fourmin.")}
    assert rooms <= set(LAYERS[0])
