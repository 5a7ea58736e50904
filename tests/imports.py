"""Reads what a source file of Penstock imports, without running it."""

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"

SOURCE_FILES = sorted(SRC.rglob("*.py"))


def name_file(path: Path) -> str:
    """The file as tests name it: its path below `src`."""
    return path.relative_to(SRC).as_posix()


def imported_names(source: str, package: str) -> list[str]:
    """Every name that `source`, a module of `package`, imports anywhere, in full.

    `from a import b` gives `a.b`, whether b is a module or not.
    `from . import c` gives `package.c`.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom():
                origin = _origin(node, package)
                names += [f"{origin}.{alias.name}" for alias in node.names]
    return names


def imported_names_of_file(path: Path) -> list[str]:
    """`imported_names` of a file below `src`."""
    package = ".".join(path.relative_to(SRC).parent.parts)
    return imported_names(path.read_text(), package)


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is `module` or something in it."""
    return name == module or name.startswith(f"{module}.")


def _origin(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])
