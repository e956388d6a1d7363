"""What holds the package together: what it imports is declared."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "lightning_fourmin"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
OPTIONAL = {("data/digits.py", "sklearn")}
"""Imports of packages that the extra `demo` brings: the file does without, or says what to install."""


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def imported(file: str) -> Iterator[str]:
    """The full name of every module that a file imports, at its top or inside of a function."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield str(node.module)


def distribution_name(requirement: str) -> str:
    return re.split(r"[\[><=~! ;]", requirement)[0].lower().replace("_", "-")


def foreign_packages(file: str) -> set[str]:
    """The top-level names of other packages that a file imports."""
    tops = {name.partition(".")[0] for name in imported(file)}
    return tops - set(sys.stdlib_module_names) - {"lightning_fourmin"}


def test_what_is_imported_is_declared() -> None:
    declared = {distribution_name(line) for line in PROJECT["dependencies"]}
    distributions = packages_distributions()
    missing = {
        (file, package)
        for file in FILES
        for package in foreign_packages(file)
        if not declared & {name.lower().replace("_", "-") for name in distributions[package]}
    }
    assert missing == OPTIONAL
