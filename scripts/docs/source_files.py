"""Reads what a file of the repository is for, defines and imports, without running it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# A comment that opens a file of these languages, and what a line of it begins or ends with.
_OPENING_COMMENT = re.compile(r"\A(?:(?://[^\n]*\n)+|/\*.*?\*/|<!--.*?-->)", re.DOTALL)
_COMMENT_MARKS = re.compile(
    r"^[ \t]*(?:///?|/\*+|\*(?!/)|<!--)? ?|[ \t]*(?:\*+/|-->)$", re.MULTILINE
)
_SCRIPT_NAME = re.compile(
    r"^(?:/\*\* (?P<summary>[^\n]*?) ?\*/\n)?(?:export )?(?:async )?"
    r"(?P<kind>function\*?|class|const) (?P<name>[A-Za-z_$][\w$]*)",
    re.MULTILINE,
)
_SCRIPT_KINDS = {"class": "class", "const": "constant"}


@dataclass(frozen=True, slots=True)
class Name:
    """Something that a file defines and others may use."""

    name: str
    """With its class before it: `Schedule.verify`."""
    kind: str
    line: int
    summary: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """What is known of a file, from its text alone."""

    path: str
    """From the root of the repository, with slashes."""
    text: str
    module: str = ""
    """As it is imported; empty if it is not Python, or a script."""
    purpose: str = ""
    names: tuple[Name, ...] = ()
    imports: tuple[str, ...] = ()
    """In full: `from a import b` gives `a.b`, whether b is a module or not. So does `penstock.b`
    behind `import penstock`."""
    exports: tuple[str, ...] = ()
    """Where a package takes what it offers from, in full."""

    @property
    def title(self) -> str:
        """The module, or the path of what is none."""
        return self.module or self.path


def read_source_file(root: Path, path: str) -> SourceFile:
    """Reads the file at `path` below `root`."""
    text = (root / path).read_text(encoding="utf-8-sig")
    match PurePosixPath(path).suffix:
        case ".py":
            return read_python(path, text)
        case ".md":
            heading = re.search(r"^# (.+)$", text, re.MULTILINE)
            return SourceFile(path, text, purpose=heading[1] if heading else "")
        case ".js":
            return SourceFile(
                path, text, purpose=_opening_comment(text), names=tuple(_script_names(text))
            )
        case _:
            return SourceFile(path, text, purpose=_opening_comment(text))


def read_python(path: str, text: str) -> SourceFile:
    """Reads the text of a Python file."""
    tree = ast.parse(text, path)
    module = _module_of(path)
    package = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
    imports = tuple(dict.fromkeys(_imported_names(tree, package)))
    offers = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in tree.body
    )
    return SourceFile(
        path,
        text,
        module=module,
        purpose=ast.get_docstring(tree) or "",
        names=tuple(_defined_names(tree, text.splitlines())),
        imports=imports,
        exports=imports if offers and path.endswith("/__init__.py") else (),
    )


def _module_of(path: str) -> str:
    if not path.startswith("src/"):
        return ""
    parts = PurePosixPath(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parents = package.split(".")
                base = parents[: len(parents) - node.level + 1] if node.level else []
                origin = ".".join([*base, *filter(None, [node.module])])
                yield from (f"{origin}.{alias.name}" for alias in node.names)
            case ast.Attribute() if dotted := _name_in_package(node):
                yield dotted


def _name_in_package(node: ast.Attribute) -> str:
    """`penstock.sim.simulator`, where that is what was written; otherwise nothing."""
    parts = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    is_inside = isinstance(value, ast.Name) and value.id == "penstock"
    return ".".join(["penstock", *reversed(parts)]) if is_inside else ""


def _defined_names(tree: ast.Module, lines: list[str]) -> Iterator[Name]:
    """The names without a leading underscore: of the module, and the methods of its classes."""
    seen: set[str] = set()
    for name in _all_names(tree.body, lines):
        if name.name not in seen and not any(part[0] == "_" for part in name.name.split(".")):
            seen.add(name.name)  # An overload and a setter come again.
            yield name


def _all_names(body: list[ast.stmt], lines: list[str]) -> Iterator[Name]:
    for number, node in enumerate(body):
        match node:
            case ast.ClassDef():
                yield Name(node.name, "class", node.lineno, _summary(node))
                yield from _methods(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield Name(node.name, "function", node.lineno, _summary(node))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                after = body[number + 1] if number + 1 < len(body) else None
                yield Name(name, "constant", node.lineno, _constant_summary(node, after, lines))


def _methods(owner: ast.ClassDef) -> Iterator[Name]:
    for node in owner.body:
        if isinstance(node, _FUNCTIONS):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            is_property = decorators & {"property", "cached_property", "functools.cached_property"}
            kind = "property" if is_property else "method"
            yield Name(f"{owner.name}.{node.name}", kind, node.lineno, _summary(node))


def _summary(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""


def _constant_summary(node: ast.stmt, after: ast.stmt | None, lines: list[str]) -> str:
    """The string behind the assignment, or the comment above it."""
    match after:
        case ast.Expr(value=ast.Constant(value=str() as docstring)):
            return docstring
    comment: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.startswith("# "):
            break
        comment.insert(0, line.removeprefix("# "))
    return " ".join(comment)


def _opening_comment(text: str) -> str:
    comment = _OPENING_COMMENT.match(text)
    return _COMMENT_MARKS.sub("", comment[0]).strip() if comment else ""


def _script_names(text: str) -> Iterator[Name]:
    for found in _SCRIPT_NAME.finditer(text):
        line = text.count("\n", 0, found.start("kind")) + 1
        kind = _SCRIPT_KINDS.get(found["kind"], "function")
        yield Name(found["name"], kind, line, found["summary"] or "")
