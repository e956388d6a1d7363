"""The main tests in a fresh environment: another Python, another torch, the oldest or the newest packages.

Examples: .venv/bin/python tests/versions.py python3.12 newest
          .venv/bin/python tests/versions.py python3.11 newest --torch 2.15.0

`oldest` and `newest` are those that pyproject.toml allows. `--torch` takes any version, also one beyond that range: so
a new minor is tested before the range is widened. Some exist for CUDA alone: they run on a machine without a GPU as
well, and take 6 GB of disk while the tests run.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[1]
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "pytorch-optimizer", "scikit-learn")
TESTS = (
    "allreduce/test_buckets.py",
    "allreduce/test_collectives.py",
    "allreduce/test_engine.py",
    "allreduce/test_engine_errors.py",
    "callbacks/test_scaling_monitor.py",
    "cli/test_train.py",
    "data/test_damage.py",
    "data/test_datamodule.py",
    "data/test_loader.py",
    "faults/test_checkpoints.py",
    "faults/test_faults_numbers.py",
    "faults/test_preemption.py",
    "optim/test_lars.py",
    "precision/test_precision.py",
    "precision/test_precision_distributed.py",
    "strategy/test_ddp_features.py",
    "strategy/test_strategy_input.py",
    "strategy/test_transparency.py",
)
"""What meets torch, Lightning, Hydra and the like most closely."""


def requirements(oldest: bool, torch: str | None) -> list[str]:
    """What pyproject.toml declares for the package and its command line; the oldest of each, or any allowed one."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["data"], *extras["app"]]
    wanted = [line for line in declared if not line.startswith(project["name"])]
    if torch is not None:
        wanted = [f"torch=={torch}" if line.startswith("torch>") else line for line in wanted]
    return [re.sub(r">=([\w.]+).*", r"==\1", line) if oldest else line for line in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("packages", choices=["oldest", "newest"])
    parser.add_argument("--torch", metavar="VERSION", help="this version, whatever pyproject.toml allows")
    parser.add_argument("--processes", type=int, default=2, help="that run tests side by side")
    arguments = parser.parse_args()
    wanted = requirements(arguments.packages == "oldest", arguments.torch)
    files = [REPO / "tests" / name for name in TESTS]
    if missing := [str(file) for file in files if not file.is_file()]:
        parser.error(f"not there: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="fourmin-versions-") as folder:
        subprocess.run([arguments.python, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        subprocess.run([*install, "--prefer-binary", *wanted, *TOOLS], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(REPO)], check=True)
        listed = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        names = {re.split("[><=]", line)[0] for line in wanted}
        found = [line for line in listed.splitlines() if line.split("==")[0].lower() in names]
        version = subprocess.run([python, "--version"], check=True, capture_output=True, text=True).stdout.strip()
        print(f"{version}, {arguments.packages}:", ", ".join(found), flush=True)
        side_by_side = ["-n", str(arguments.processes), "--dist", "loadfile"] if arguments.processes > 1 else []
        command = [python, "-m", "pytest", "-q", *side_by_side, "-p", "no:cacheprovider", *map(str, files)]
        sys.exit(subprocess.run(command, cwd=REPO).returncode)


if __name__ == "__main__":
    main()
