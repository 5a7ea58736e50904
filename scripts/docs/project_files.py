"""The files that have a page of their own, and how they hang together."""

import ast
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from repository_links import find_linked_files
from source_files import Name, SourceFile, read_source_file

# Every one of these has a page, and so has any other file that one of the docs links to.
_WITH_PAGES = (
    "*.md",
    "src/penstock/**/*.py",
    "src/penstock/**/*.js",
    "src/penstock/**/*.css",
    "src/penstock/**/*.html",
    "examples/*.py",
    "benchmarks/*.py",
    "benchmarks/*/*.md",
    "benchmarks/*/*.py",
)
# What a browser shows by itself is copied as it is.
_SHOWN_AS_IS = frozenset({".csv", ".json", ".pdf", ".png", ".svg", ".txt"})


@dataclass(frozen=True)
class Place:
    """Where a name is defined."""

    file: SourceFile
    name: Name


@dataclass(frozen=True)
class Project:
    """The files with pages, by their paths; the test files; and the layers in their order."""

    files: dict[str, SourceFile]
    tests: tuple[SourceFile, ...] = ()
    layers: tuple[str, ...] = ()
    layers_without_torch: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    """Linked files that need no page, such as pictures."""

    @cached_property
    def folders(self) -> dict[str, list[str]]:
        """What is directly in each folder; the root is the empty text."""
        inside: dict[str, list[str]] = {"": []}
        for path in sorted({*self.files, *self.copied}):
            while path:
                folder = posixpath.dirname(path).removesuffix("src")  # That holds one package.
                if path not in inside.setdefault(folder, []):
                    inside[folder].append(path)
                path = folder
        return inside

    @cached_property
    def imports(self) -> dict[str, dict[str, list[str]]]:
        """Which files each file imports from, and which names."""
        return {path: self._imports_of(file) for path, file in self.files.items()}

    @cached_property
    def importers(self) -> dict[str, list[str]]:
        """Which files import from each file."""
        return self._invert(self.imports)

    @cached_property
    def tests_of(self) -> dict[str, list[str]]:
        """Which tests import from each file."""
        return self._invert({test.path: self._imports_of(test) for test in self.tests})

    @cached_property
    def public_paths(self) -> dict[tuple[str, str], str]:
        """The shortest path by which users import a name, from its file and itself."""
        paths: dict[tuple[str, str], str] = {}
        for package in sorted(self._modules.values(), key=lambda file: file.module.count(".")):
            for origin in package.exports:
                if place := self.find(origin):
                    path = f"{package.module}.{place.name.name}"
                    paths.setdefault((place.file.path, place.name.name), path)
        return paths

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where each public name, and each method of one, is defined."""
        return {
            public + name.name.removeprefix(top): Place(self.files[path], name)
            for (path, top), public in self.public_paths.items()
            for name in self.files[path].names
            if name.name == top or name.name.startswith(f"{top}.")
        }

    def find(self, path: str) -> Place | None:
        """Follows a name to where it is defined, through packages that pass it on."""
        module, _, wanted = path.rpartition(".")
        file = self._modules.get(module)
        if file is None:
            return None
        for name in file.names:
            if name.name == wanted:
                return Place(file, name)
        origin = _origin_of(file, wanted)
        return self.find(origin) if origin and origin != path else None

    @cached_property
    def _modules(self) -> dict[str, SourceFile]:
        return {file.module: file for file in self.files.values() if file.module}

    def _imports_of(self, file: SourceFile) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for full in file.imports:
            module, _, name = full.rpartition(".")
            package = self._modules.get(module)
            # A package may pass on a function that has the name of its module: it hides the module.
            if full in self._modules and not (package and _origin_of(package, name)):
                found.setdefault(self._modules[full].path, [])
            elif package:
                found.setdefault(package.path, []).append(name)
        return {path: found[path] for path in sorted(found) if path != file.path}

    def _invert(self, imports: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
        """Who imports from each file, be it through a package that passes its names on."""
        importers: dict[str, set[str]] = {path: set() for path in self.files}
        for importer, imported in imports.items():
            for path, names in imported.items():
                importers[path].add(importer)
                for name in names:
                    if place := self.find(f"{self.files[path].module}.{name}"):
                        importers[place.file.path].add(importer)
        return {path: sorted(others - {path}) for path, others in importers.items()}


def read_project(root: Path) -> Project:
    """Reads the repository at `root`."""
    with_pages = set[str]().union(*(_relative(root, root.glob(each)) for each in _WITH_PAGES))
    documents = {path for path in with_pages if path.endswith(".md")}
    linked = find_linked_files(root, documents | _relative(root, root.glob("docs/**/*.md")))
    copied = {path for path in linked if PurePosixPath(path).suffix in _SHOWN_AS_IS}
    layers, without_torch = read_layers((root / "tests/test_layers.py").read_text(encoding="utf-8"))
    return Project(
        files=_read_all(root, with_pages | (linked - copied)),
        tests=tuple(_read_all(root, _relative(root, (root / "tests").rglob("*.py"))).values()),
        layers=layers,
        layers_without_torch=without_torch,
        copied=frozenset(copied),
    )


def read_layers(text: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The layers in their order, and those without torch, from tests/test_layers.py."""
    found = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) in {"WITHOUT_TORCH", "WITH_TORCH"}
    }
    return found["WITHOUT_TORCH"] + found["WITH_TORCH"], frozenset(found["WITHOUT_TORCH"])


def _origin_of(package: SourceFile, name: str) -> str | None:
    """Where a package has a name from that it passes on."""
    return next((each for each in package.exports if each.endswith(f".{name}")), None)


def _relative(root: Path, paths: Iterable[Path]) -> set[str]:
    return {path.relative_to(root).as_posix() for path in paths}


def _read_all(root: Path, paths: set[str]) -> dict[str, SourceFile]:
    return {path: read_source_file(root, path) for path in sorted(paths)}
