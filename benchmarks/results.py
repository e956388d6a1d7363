"""Writes what a benchmark measured, as JSON for programs and Markdown for people, with what it ran on."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

FOLDER = Path(__file__).parent / "results"


def machine() -> str:
    """Hardware and versions, in one line."""
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores ({model}), torch {torch.__version__}, lightning {lightning.__version__}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(name: str) -> Any:
    """The data of an earlier run, None if there is none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text())["data"] if path.exists() else None


def write(name: str, command: str, data: Any, text: str) -> None:
    """Writes results/<name>.json and .md and prints the text."""
    FOLDER.mkdir(exist_ok=True)
    about = {"command": command, "machine": machine()}
    (FOLDER / f"{name}.json").write_text(json.dumps({**about, "data": data}, indent=1) + "\n")
    page = f"Made by `{command}` on {about['machine']}.\n\n{text}\n"
    (FOLDER / f"{name}.md").write_text(page)
    print(page)
