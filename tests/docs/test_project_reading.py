"""How the files hang together, and what their pages say of it."""

import re
from pathlib import Path

import pytest

import test_layers
from api_links import add_source_links
from name_index import format_name_index
from project_files import Project, read_layers
from site_navigation import navigation
from source_files import read_python
from source_pages import CODE_PLACE, code_anchors, format_code, format_file, format_folder
from source_site import SourceSite

FILES = {
    "src/penstock/__init__.py": (
        '"""The package."""\nfrom penstock.sim import run\n__all__ = ["run"]\n'
    ),
    "src/penstock/errors.py": '"""The errors."""\nclass Error(Exception):\n    """Wrong."""\n',
    "src/penstock/sim/__init__.py": (
        '"""Simulates."""\nfrom penstock.sim.run import run, Result\n__all__ = ["Result", "run"]\n'
    ),
    "src/penstock/sim/run.py": (
        '"""Runs it."""\n\nfrom penstock.errors import Error\n\n\nclass Result:\n'
        '    def show(self) -> None:\n        """Shows | it."""\n\n\ndef run() -> Result: ...\n'
    ),
    "examples/first.py": '"""Shows: a run."""\nimport penstock\npenstock.run()\n',
}
TESTS = (read_python("tests/test_run.py", "from penstock.sim.run import run"),)


@pytest.fixture
def project() -> Project:
    return Project(
        files={path: read_python(path, text) for path, text in FILES.items()},
        tests=TESTS,
        layers=("errors", "sim"),
        layers_without_torch=frozenset({"errors"}),
    )


def test_imports_are_followed_both_ways(project: Project) -> None:
    run, errors = "src/penstock/sim/run.py", "src/penstock/errors.py"
    assert {errors: ["Error"]} == project.imports[run]
    assert [run] == project.importers[errors]
    assert ["examples/first.py"] == project.importers["src/penstock/__init__.py"]
    assert ["tests/test_run.py"] == project.tests_of[run]


def test_who_imports_through_a_package_imports_from_the_file_behind_it(project: Project) -> None:
    run = "src/penstock/sim/run.py"
    packages = ["src/penstock/__init__.py", "src/penstock/sim/__init__.py"]
    assert ["examples/first.py", *packages] == project.importers[run]


def test_public_name_has_the_shortest_path_by_which_it_is_imported(project: Project) -> None:
    run = "src/penstock/sim/run.py"
    assert {(run, "run"): "penstock.run", (run, "Result"): "penstock.sim.Result"} == (
        project.public_paths
    )


def test_public_name_and_its_methods_are_found_where_they_are_defined(project: Project) -> None:
    lines = {path: place.name.line for path, place in project.places.items()}
    assert {"penstock.run": 11, "penstock.sim.Result": 6, "penstock.sim.Result.show": 7} == lines


def test_folders_hold_files_and_folders_and_the_package_is_at_the_top(project: Project) -> None:
    assert ["examples", "src/penstock"] == project.folders[""]
    assert "src" not in project.folders
    assert [
        "src/penstock/__init__.py",
        "src/penstock/errors.py",
        "src/penstock/sim",
    ] == project.folders["src/penstock"]


def test_page_of_a_file_tells_purpose_names_imports_importers_and_tests(project: Project) -> None:
    page = format_file(project, "src/penstock/sim/run.py")
    assert "# penstock.sim.run\n\n" in page
    assert "`src/penstock/sim/run.py`, 11 lines, in [penstock.sim](index.md).\n\nRuns it." in page
    assert "| [`Result.show`](#L7) | method | [7](#L7) | Shows \\| it. |" in page
    assert (
        "| [`run`](#L11) | function | [11](#L11) | API: [`penstock.run`][penstock.run]. |" in page
    )
    assert "- [penstock.errors](../errors.py.md): [`Error`](../errors.py.md#L2)\n" in page
    assert "## Imported by\n\n[examples/first.py](../../../examples/first.py.md), " in page
    assert '??? note "Imported by 1 file of tests"\n\n    `tests/test_run.py`.\n' in page
    assert CODE_PLACE in page


def test_function_that_hides_its_module_is_imported_from_the_package(project: Project) -> None:
    assert {"src/penstock/sim/__init__.py": ["run"]} == project.imports["src/penstock/__init__.py"]


def test_imported_name_leads_to_where_it_is_defined(project: Project) -> None:
    page = format_file(project, "src/penstock/__init__.py")
    assert "- [penstock.sim](sim/__init__.py.md): [`run`](sim/run.py.md#L11)" in page


def test_page_of_a_folder_tells_its_layer_and_its_files(project: Project) -> None:
    page = format_folder(project, "src/penstock/sim")
    assert "# penstock.sim\n\nSimulates.\n\nIt may import from `errors`.\n" in page
    assert "| [`run.py`](run.py.md) | Runs it. |" in page


def test_page_of_the_package_has_the_layers_in_their_order(project: Project) -> None:
    page = format_folder(project, "src/penstock")
    rows = [
        "| [`errors.py`](errors.py.md) |  | The errors. |",
        "| [`sim/`](sim/index.md) | yes | Simulates. |",
        "| [`__init__.py`](__init__.py.md) | The package. |",
    ]
    assert rows == [row for row in page.splitlines() if row.startswith("| [")]


def test_index_has_every_name_under_its_letter(project: Project) -> None:
    page = format_name_index(project)
    assert ["E", "R", "S"] == re.findall(r"^## (.)$", page, re.MULTILINE)
    assert "- [`show`](src/penstock/sim/run.py.md#L7) method · penstock.sim.run.Result\n" in page
    run = "- [`run`](src/penstock/sim/run.py.md#L11) function · penstock.sim.run · "
    assert run + "[API][penstock.run]\n" in page


def test_navigation_has_a_section_for_each_folder_with_its_page_first(project: Project) -> None:
    sim = ["source/src/penstock/sim/index.md"]
    sim += [
        {"__init__": "source/src/penstock/sim/__init__.py.md"},
        {"run": "source/src/penstock/sim/run.py.md"},
    ]
    package = ["source/src/penstock/index.md", {"sim": sim}]
    package += [
        {"__init__": "source/src/penstock/__init__.py.md"},
        {"errors": "source/src/penstock/errors.py.md"},
    ]
    first = {"first": "source/examples/first.py.md"}
    assert [
        "source/index.md",
        {"All names": "source/names.md"},
        {"penstock": package},
        {"examples": ["source/examples/index.md", first]},
    ] == navigation(project)


@pytest.mark.parametrize("text", ["\nx = '<'\n", "x\ny\n", "no end of line", ""])
def test_each_line_of_code_has_its_anchor(text: str) -> None:
    anchors = re.findall(r'id="(L\d+)"', format_code("a.py", text))
    assert len(set(anchors)) == len(anchors)
    assert code_anchors(text) == set(anchors)


def test_code_is_shown_as_it_is() -> None:
    assert "&lt;" in format_code("a.py", "x = '<'\n")


def test_file_of_no_known_language_is_shown_too() -> None:
    assert ">line 1</span>" in format_code("LICENSE", "line 1\n")


def test_heading_of_the_api_gets_a_link_to_its_source() -> None:
    heading = '<h3 id="penstock.run" class="doc doc-heading">run</h3>'
    html = add_source_links(heading, {"penstock.run": "run.py.html#L3"}.get)
    assert 'run<a class="source-link" href="run.py.html#L3"' in html
    assert heading == add_source_links(heading, lambda path: None)


def test_layers_are_those_of_their_test() -> None:
    text = Path(test_layers.__file__).read_text()
    expected = (test_layers.LAYERS, frozenset(test_layers.WITHOUT_TORCH))
    assert expected == read_layers(text)


def test_repository_is_read_with_what_its_documents_link_to(tmp_path: Path) -> None:
    extra = {
        "tests/test_layers.py": 'WITHOUT_TORCH = ("errors",)\nWITH_TORCH = ("sim",)\n',
        "README.md": "[guide](docs/guide.md), [figures](data/a.json)",
        "docs/guide.md": "[test](../tests/test_layers.py)",
        "data/a.json": "{}",
    }
    for path, text in (FILES | extra).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    site = SourceSite(tmp_path)
    pages = site.pages()
    assert {f"source/{path}.md" for path in (*FILES, "README.md", "tests/test_layers.py")} <= {
        *pages
    }
    assert "[guide](../guide.md), [figures](data/a.json)" == pages["source/README.md.md"]
    assert {"source/data/a.json": tmp_path / "data/a.json"} == site.copies()
    led = site.lead("[b](../src/penstock/sim/)", document="docs/guide.md", page="guide.md")
    assert "[b](source/src/penstock/sim/index.md)" == led
    assert site.page_of("tests/missing.py") is None
    shown = [site.file_at(f"source/{path}.md") for path in ("examples/first.py", "README.md")]
    assert [site.project.files["examples/first.py"], None] == shown
