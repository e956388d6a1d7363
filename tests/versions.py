"""The main tests with another Python, and the oldest or the newest packages that pyproject.toml allows.

Example: .venv/bin/python tests/versions.py python3.12 newest
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).parents[1]
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "pytorch-optimizer", "scikit-learn")
TESTS = (
    "checkpoints",
    "damage",
    "datamodule",
    "engine",
    "engine_errors",
    "faults_numbers",
    "fusion",
    "lars",
    "loader",
    "precision",
    "precision_distributed",
    "scaling_monitor",
    "strategy_input",
    "train",
    "transparency",
)
"""What meets torch, Lightning, Hydra and the like most closely."""


def requirements(oldest: bool) -> list[str]:
    text = (REPO / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    declared = re.findall(r'"(.+)"', block)
    return [re.sub(r">=([\w.]+).*", r"==\1", line) if oldest else line for line in declared]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("packages", choices=["oldest", "newest"])
    arguments = parser.parse_args()
    wanted = requirements(arguments.packages == "oldest")
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
        files = [str(REPO / "tests" / f"test_{name}.py") for name in TESTS]
        command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *files]
        sys.exit(subprocess.run(command, cwd=REPO).returncode)


if __name__ == "__main__":
    main()
