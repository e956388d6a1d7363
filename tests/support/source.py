"""The files of the package as syntax trees, for tests of what they import and name."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "lightning_fourmin"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
"""Every file of the package, as a path below it."""


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
