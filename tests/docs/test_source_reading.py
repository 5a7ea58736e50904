"""What a file is for, defines and imports is read from its text."""

from pathlib import Path

from source_files import Name, read_python, read_source_file

MODULE = '''"""Why it exists."""

import json
from penstock.ir import action
from . import sibling
from ..errors import Error as Error

# How long,
# at most.
LIMIT_S = 3
Pair = tuple[int, int]
"""Two of them."""
_hidden = 1


class Thing:
    """A thing."""

    field: int = 0

    def __init__(self) -> None: ...

    @property
    def size(self) -> int:
        """Its size."""

    @size.setter
    def size(self, size: int) -> None: ...

    def _hide(self) -> None: ...

    async def grow(self) -> None: ...


class _Hidden:
    def method(self) -> None: ...


def act() -> None:
    """Acts.

    For long.
    """
    import late
'''


def test_purpose_of_a_module_is_its_docstring() -> None:
    assert "Why it exists." == read_python("src/penstock/sim/a.py", MODULE).purpose


def test_names_are_those_without_a_leading_underscore_with_their_lines() -> None:
    assert (
        Name("LIMIT_S", "constant", 10, "How long, at most."),
        Name("Pair", "constant", 11, "Two of them."),
        Name("Thing", "class", 16, "A thing."),
        Name("Thing.size", "property", 24, "Its size."),
        Name("Thing.grow", "method", 32, ""),
        Name("act", "function", 39, "Acts.\n\nFor long."),
    ) == read_python("src/penstock/sim/a.py", MODULE).names


def test_imports_are_told_in_full_wherever_they_stand() -> None:
    assert (
        "json",
        "penstock.ir.action",
        "penstock.sim.sibling",
        "penstock.errors.Error",
        "late",
    ) == read_python("src/penstock/sim/a.py", MODULE).imports


def test_name_taken_from_the_package_counts_as_imported() -> None:
    file = read_python("examples/a.py", "import penstock\npenstock.sim.run(penstock.x.y)\nz.w")
    expected = {"penstock", "penstock.sim", "penstock.sim.run", "penstock.x", "penstock.x.y"}
    assert expected == set(file.imports)


def test_relative_import_of_a_package_starts_at_the_package_itself() -> None:
    file = read_python("src/penstock/sim/__init__.py", "from .cost import CostTable")
    assert ("penstock.costs.cost_table.CostTable",) == file.imports


def test_module_is_named_as_it_is_imported_and_a_script_by_its_path() -> None:
    paths = ("src/penstock/__init__.py", "src/penstock/costs/cost_table.py", "examples/train.py")
    titles = [read_python(path, "").title for path in paths]
    assert ["penstock", "penstock.costs.cost_table", "examples/train.py"] == titles


def test_package_exports_what_it_imports_if_it_says_what_it_offers() -> None:
    text = "from penstock.costs.cost_table import CostTable\n"
    path = "src/penstock/sim/__init__.py"
    assert () == read_python(path, text).exports
    offering = read_python(path, text + '__all__ = ["CostTable"]')
    assert ("penstock.costs.cost_table.CostTable",) == offering.exports


def test_script_of_a_page_has_its_opening_comment_and_its_names(tmp_path: Path) -> None:
    script = "// Draws it.\n// Twice.\n\nconst WIDTH = 3;\n\n/** Makes one. */\nfunction make() {\n"
    (tmp_path / "page.js").write_text(script + "  const inner = 1;\n}\nclass Lane {}\n")
    file = read_source_file(tmp_path, "page.js")
    assert "Draws it.\nTwice." == file.purpose
    assert (
        Name("WIDTH", "constant", 4, ""),
        Name("make", "function", 7, "Makes one."),
        Name("Lane", "class", 10, ""),
    ) == file.names


def test_comment_that_opens_a_style_sheet_or_a_page_is_its_purpose(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("/* The looks.\n * All. */\nbody {}\n")
    (tmp_path / "a.html").write_text("<!-- The page. -->\n<p>\n")
    files = [read_source_file(tmp_path, name) for name in ("a.css", "a.html")]
    assert ["The looks.\nAll.", "The page."] == [file.purpose for file in files]


def test_purpose_of_a_document_is_its_heading(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# What it is\n\nText.\n")
    assert "What it is" == read_source_file(tmp_path, "a.md").purpose
