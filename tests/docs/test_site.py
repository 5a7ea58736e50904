"""The site builds without a warning, has every file and name, and all its links lead somewhere."""

import ast
import os
import pkgutil
import re
import subprocess
import sys
from functools import cache
from html import unescape
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import griffe
import pytest
from filelock import FileLock
from mkdocstrings import Inventory

import penstock

ROOT = Path(__file__).parents[2]
BUILD_DEADLINE_S = 300
SOURCE_FILES = [
    file.relative_to(ROOT)
    for pattern in ("src/**/*.py", "src/**/*.js", "examples/*.py", "benchmarks/*/*.*", "*.md")
    for file in ROOT.glob(pattern)
    if file.stat().st_size
]
MODULES = [file for file in SOURCE_FILES if file.parts[0] == "src" and file.suffix == ".py"]
# What a browser fetches to show a page, and for a style sheet.
FETCHED_BY_PAGE = re.compile(r'(?:<link\b[^>]*\shref|\s(?:src|srcset|data|poster))="([^"]*)"')
FETCHED_BY_STYLE = re.compile(r"""(?:url\(|@import\s+)["']?([^"')]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The built site, with what the build printed in log.txt beside it."""
    base = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        base = base.parent  # Of all workers, so that one of them builds it for all.
    with FileLock(base / "site.lock", timeout=BUILD_DEADLINE_S):
        if not (base / "log.txt").exists():
            log = build(base / "site")
            (base / "log.txt").write_text(log)
    return base / "site"


def build(directory: Path) -> str:
    """Build the site as `make docs` does, without its index for searching and its formatted
    signatures; return what was printed, and how it ended."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory],
        cwd=ROOT,
        env=os.environ
        | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1", "PENSTOCK_SITE_DETAILS": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    return f"{done.stdout}exit status {done.returncode}\n"


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def ids_of(page: Path) -> set[str]:
    return {unescape(each) for each in re.findall(r'\bid="([^"]*)"', read(page))}


def page_of(file: Path) -> Path:
    """Return where the site shows a file of the repository."""
    if file.name in {"__init__.py", "README.md"}:
        return "source" / file.parent / "index.html"
    return "source" / file.parent / f"{file.name.removesuffix('.md')}.html"


def definitions(file: Path) -> set[str]:
    """Return the paths of the public functions and classes that a module defines."""
    body = ast.parse((ROOT / file).read_text()).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    module = ".".join(file.relative_to("src").with_suffix("").parts).removesuffix(".__init__")
    return {f"{module}.{name}" for name in names if not name.startswith("_")}


def test_build_is_strict_and_prints_no_warning(site: Path) -> None:
    lines = (site.parent / "log.txt").read_text().splitlines()
    unexpected = [line for line in lines if not line.startswith("INFO    -  ")]
    assert ["exit status 0"] == unexpected


def test_every_source_file_has_a_page(site: Path) -> None:
    assert len(SOURCE_FILES) > 200
    assert [] == [file for file in SOURCE_FILES if not (site / page_of(file)).is_file()]


def test_page_of_a_source_file_has_all_its_lines(site: Path) -> None:
    for file in SOURCE_FILES:
        if file.suffix != ".md":
            num_lines = len((ROOT / file).read_text().splitlines())
            assert f"__codelineno-code-{num_lines}" in ids_of(site / page_of(file)), file


def test_page_of_a_module_documents_what_the_module_defines(site: Path) -> None:
    assert len(MODULES) > 150
    for file in MODULES:
        assert set() == definitions(file) - ids_of(site / page_of(file)), file


def test_index_links_to_every_definition(site: Path) -> None:
    links = set(re.findall(r'href="([^"]*)"', read(site / "source/names.html")))
    for file in MODULES:
        page = page_of(file).relative_to("source")
        assert set() == {f"{page}#{path}" for path in definitions(file)} - links, file


def test_every_internal_link_leads_to_a_page_and_an_anchor(site: Path) -> None:
    broken = []
    for page in site.rglob("*.html"):
        for link in set(re.findall(r'\s(?:href|src|srcset)="([^"]*)"', read(page))):
            address = urlsplit(unescape(link))
            if address.scheme or address.netloc:
                continue
            # The page for errors has absolute links, as it is shown in place of any other.
            base = site if address.path.startswith("/") else page.parent
            target = (base / unquote(address.path).lstrip("/")).resolve() if address.path else page
            has_anchor = (
                target.suffix != ".html"  # What follows a picture's name is for the style sheet.
                or not address.fragment
                or unquote(address.fragment) in ids_of(target)
            )
            if not (target.is_file() and has_anchor):
                broken.append((page.relative_to(site).as_posix(), link))
    assert [] == broken


def test_link_to_a_file_of_the_repository_leads_to_its_page(site: Path) -> None:
    assert "](../examples/train.py)" in (ROOT / "docs/auto.md").read_text()
    assert 'href="source/examples/train.py.html"' in read(site / "auto.html")
    assert "](examples/train.py)" in (ROOT / "README.md").read_text()
    assert 'href="examples/train.py.html"' in read(site / "source/index.html")


def test_link_called_by_a_file_name_shows_the_title(site: Path) -> None:
    assert "[CONTRIBUTING.md](CONTRIBUTING.md)" in (ROOT / "README.md").read_text()
    assert '<a href="CONTRIBUTING.html">Contributing</a>' in read(site / "source/index.html")


def test_name_in_the_api_links_to_the_lines_that_define_it(site: Path) -> None:
    heading = re.compile(r'<h\d id="(\S+)" class="doc doc-heading">(.*?)</h\d>', re.DOTALL)
    link = re.compile(r'class="source-link" href="\.\./source/(\S+)\.html#__codelineno-code-(\d+)"')
    headings = [each for page in site.glob("api/*.html") for each in heading.findall(read(page))]
    assert len(headings) > 100
    for name, html in headings:
        [(page, line)] = link.findall(html)
        file = ROOT / page
        text = (file.with_name("__init__.py") if file.name == "index" else file).read_text()
        definition = "\n".join(text.splitlines()[int(line) - 1 :][:9])  # After its decorators.
        assert name.rpartition(".")[2] in definition, name


def public_packages() -> list[ModuleType]:
    """Return Penstock, and each of its packages that says what it exports."""
    found = pkgutil.walk_packages(penstock.__path__, "penstock.")
    packages = [import_module(module.name) for module in found if module.ispkg]
    return [penstock, *(package for package in packages if hasattr(package, "__all__"))]


PUBLIC_NAMES = [
    f"{package.__name__}.{name}"
    for package in public_packages()
    for name in package.__all__
    if not isinstance(getattr(package, name), ModuleType)
]


def test_every_public_name_is_in_the_api(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    assert len(PUBLIC_NAMES) > 100
    assert [] == [name for name in PUBLIC_NAMES if name not in documented]


def test_every_public_name_has_a_docstring() -> None:
    package = griffe.load("penstock", search_paths=[ROOT / "src"], resolve_aliases=True)
    paths = [name.removeprefix("penstock.") for name in PUBLIC_NAMES]
    assert [] == [path for path in paths if not package[path].has_docstring]


def test_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 250
    assert styles
    fetched = {(path.name, each) for path in pages for each in FETCHED_BY_PAGE.findall(read(path))}
    fetched |= {
        (path.name, each) for path in styles for each in FETCHED_BY_STYLE.findall(read(path))
    }
    assert set() == {(name, each) for name, each in fetched if re.match("(https?:)?//", each)}


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (["https://a.org/x.js"], '<script src="https://a.org/x.js"></script>'),
        (["//a.org/x.css"], '<link rel="stylesheet" href="//a.org/x.css">'),
        ([], '<a href="https://a.org">a</a>'),
    ],
)
def test_what_a_page_fetches_is_found(expected: list[str], text: str) -> None:
    assert expected == FETCHED_BY_PAGE.findall(text)
