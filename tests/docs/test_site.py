"""The site builds without a warning, has every public name and file, and fetches nothing."""

import os
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType

import griffe
import pytest
from filelock import FileLock
from mkdocstrings import Inventory

import penstock

ROOT = Path(__file__).parents[2]
BUILD_DEADLINE_S = 300


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
    """Builds the site as `make docs` does; what was printed, and how it ended."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    return f"{done.stdout}exit status {done.returncode}\n"


def test_build_is_strict_and_prints_no_warning(site: Path) -> None:
    lines = (site.parent / "log.txt").read_text().splitlines()
    unexpected = [line for line in lines if not line.startswith("INFO    -  ")]
    assert ["exit status 0"] == unexpected


def test_every_source_file_has_a_page(site: Path) -> None:
    files = [*ROOT.glob("src/penstock/**/*.py"), *ROOT.glob("examples/*.py")]
    files += [*ROOT.glob("src/penstock/**/*.js"), *ROOT.glob("benchmarks/*/README.md")]
    paths = [file.relative_to(ROOT) for file in files]
    assert len(paths) > 200
    assert [] == [path for path in paths if not (site / "source" / f"{path}.html").is_file()]


def test_page_of_a_source_file_has_its_text(site: Path) -> None:
    page = (site / "source/src/penstock/errors.py.html").read_text()
    lines = (ROOT / "src/penstock/errors.py").read_text().splitlines()
    line = lines.index("class StageError(PipelineError, ValueError):") + 1
    assert re.search(f'<span id="L{line}">.*StageError', page)


def public_packages() -> list[ModuleType]:
    """Penstock, and each of its packages that says what it offers."""
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
    seen_as_users = griffe.load_extensions(ROOT / "scripts/docs/shadowed_modules.py")
    package = griffe.load(
        "penstock", search_paths=[ROOT / "src"], extensions=seen_as_users, resolve_aliases=True
    )
    paths = [name.removeprefix("penstock.") for name in PUBLIC_NAMES]
    assert [] == [path for path in paths if not package[path].has_docstring]


class Fetched(HTMLParser):
    """Collects the addresses that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fetching = {"src", "srcset", "data", "poster"} | ({"href"} if tag == "link" else set())
        self.addresses += [value for name, value in attrs if name in fetching and value]


def fetched_by(path: Path) -> list[str]:
    """What a page or a style sheet fetches."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        return re.findall(r"url\([\"']?([^)\"']+)|@import\s+[\"']([^\"']+)", text)
    parser = Fetched()
    parser.feed(text)
    return parser.addresses


def is_elsewhere(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


def test_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 250
    assert styles
    fetched = {(path.name, each) for path in pages + styles for each in fetched_by(path)}
    assert set() == {(name, each) for name, each in fetched if is_elsewhere("".join(each))}


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (["https://a.org/x.js"], '<script src="https://a.org/x.js"></script>'),
        (["//a.org/x.css"], '<link rel="stylesheet" href="//a.org/x.css">'),
        ([], '<a href="https://a.org">a</a>'),
    ],
)
def test_what_is_fetched_from_elsewhere_is_found(
    expected: list[str], text: str, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(text)
    found = fetched_by(tmp_path / "page.html")
    assert expected == [address for address in found if is_elsewhere(address)]
