"""Finds the private names of torch that a source file has, without running it."""

import ast
import re
from collections.abc import Collection, Iterator

_IN_TEXT = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*", re.IGNORECASE)
# Of the standard library, on values that are not torch's.
_NOT_OF_TORCH = {"_asdict", "_current_frames", "_exit", "_fields", "_replace"}


def private_names(
    source: str, undocumented: Collection[str], attributes: Collection[str]
) -> list[str]:
    """Return each private name in `source`, once: in full, or an attribute alone.

    `undocumented` are names that count as private though they have no underscore. `attributes` are
    those of torch's objects; other attributes with an underscore count unless the file has made
    them itself.
    """
    tree = ast.parse(source)
    imported = dict(_imported(tree))
    own = set(_own_attributes(tree))
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                found += [name for _, name in _imported(node) if _is_private(name, undocumented)]
            case ast.Attribute(attr=attribute, value=value):
                name = _full_name(node, imported)
                if name is not None and _is_private(name, undocumented):
                    found.append(name)
                elif not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                    is_foreign = _has_underscore(attribute) and attribute not in own
                    if attribute in attributes or is_foreign:
                        found.append(attribute)
            case ast.Constant(value=str(text)):
                found += _IN_TEXT.findall(text)
                if text in attributes or text.startswith(("_saved_", "_raw_saved_")):
                    found.append(text)
    return sorted(set(found) - _NOT_OF_TORCH)


def _has_underscore(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _is_private(name: str, undocumented: Collection[str]) -> bool:
    first, *others = name.split(".")
    return first == "torch" and (name in undocumented or any(map(_has_underscore, others)))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and what it stands for."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield alias.asname or alias.name, alias.name
                    if alias.asname is None:
                        first = alias.name.partition(".")[0]
                        yield first, first
            case ast.ImportFrom(module=str(module), level=0, names=names):
                for alias in names:
                    yield alias.asname or alias.name, f"{module}.{alias.name}"


def _full_name(node: ast.expr, imported: dict[str, str]) -> str | None:
    """Return the dotted name that a chain of attributes stands for, if it begins at an import."""
    match node:
        case ast.Name(id=name):
            return imported.get(name)
        case ast.Attribute(attr=attribute, value=value):
            owner = _full_name(value, imported)
            return None if owner is None else f"{owner}.{attribute}"
    return None


def _own_attributes(tree: ast.AST) -> Iterator[str]:
    """Attributes that a file makes: methods, what is set on `self`, slots, and those of classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                yield name
