"""Every Python example of the README and the docs runs as it stands, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/*.md")])
EXAMPLES = [
    pytest.param(page, match, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, match in enumerate(
        re.finditer(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    )
    # The script of the README is run by tests/dist/test_examples_on_ranks.py.
    if (page.name, "init_process_group" in match[1]) != ("README.md", True)
]


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_example_runs(
    page: Path, example: re.Match[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # For what it writes.
    # The empty lines make a traceback show the lines of the page.
    lines_before = "\n" * page.read_text()[: example.start(1)].count("\n")
    exec(compile(lines_before + example[1], page, "exec"), {})


def test_readme_and_schedules_have_examples() -> None:
    with_examples = {page.name for page, _ in (example.values for example in EXAMPLES)}
    assert {"README.md", "schedules.md"} <= with_examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_link_to_a_file_leads_to_one(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [] == [target for target in targets if not (page.parent / target).exists()]


def test_own_schedule_in_the_docs_is_under_20_lines() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text()
    [own] = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "yield" in block]
    assert len([line for line in own.splitlines() if line.strip()]) < 20
