"""What the README and the docs show runs, prints what is shown, and leads somewhere."""

import contextlib
import inspect
import io
import re
import shlex
from pathlib import Path

import pytest

from penstock import CostTable, Report, Schedule, cli, errors, schedules, simulate
from penstock.ir import Send
from penstock.passes import add_comms
from penstock.schedules import Shape

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("benchmarks/*/*.md")])
GUIDE = [page for page in sorted(DOCS.glob("*.md")) if page.name != "index.md"]
# Scripts that need several processes are run by tests/dist, and so are those in examples/ that
# pages show a piece of.
WITH_SCRIPTS = ("README.md", "start.md")
SCRIPTS = [script.read_text() for script in sorted(ROOT.glob("examples/*.py"))]
EXAMPLES = [
    pytest.param(page, match, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, match in enumerate(
        # A block of text right behind is what the example prints.
        re.finditer(
            r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page.read_text(), flags=re.DOTALL
        )
    )
    if not (page.name in WITH_SCRIPTS and "init_process_group" in match[1])
    and not any(match[1] in script for script in SCRIPTS)
]
CONSOLES = [  # Those of docs/command_line.md are run by tests/cli/test_command_line_docs.py.
    pytest.param(block, id=f"{page.name}:{number}")
    for page in GUIDE
    if page.name != "command_line.md"
    for number, block in enumerate(
        re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.DOTALL)
    )
]


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_example_runs_and_prints_what_is_shown(
    page: Path, example: re.Match[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # For what it writes.
    # The empty lines make a traceback show the lines of the page.
    lines_before = "\n" * page.read_text()[: example.start(1)].count("\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(lines_before + example[1], page, "exec"), {})
    if example[2] is not None:
        shown = example[2].splitlines()
        assert shown == [line.rstrip() for line in printed.getvalue().splitlines()]


@pytest.mark.parametrize("block", CONSOLES)
def test_command_line_prints_what_is_shown(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    commands = re.findall(r"^\$ penstock (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)
    assert block.count("$ ") == len(commands)
    CostTable.uniform(2).save(tmp_path / "costs.json")  # The example before it would leave one.
    for command, shown in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main(shlex.split(command))
        assert int(shown.startswith("error: ")) == (ended.value.code or 0), command
        printed = capsys.readouterr()
        lines = (printed.out + printed.err).splitlines()
        assert lines
        assert shown.splitlines() == lines[: len(shown.splitlines())], command


def test_readme_and_schedules_have_examples() -> None:
    with_examples = {page.name for page, _ in (example.values for example in EXAMPLES)}
    assert {"README.md", "schedules.md", "own_schedule.md", "debugging.md"} <= with_examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text())
    for target, anchor in links:
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{target}#{anchor}"


def _anchors(page: Path) -> list[str]:
    """The ids of a page's headings, which sites make of their words."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_page_of_the_guide_says_where_to_go_next(page: Path) -> None:
    assert "\n## Next\n" in page.read_text()


def test_own_schedule_in_the_docs_is_under_20_lines() -> None:
    text = (DOCS / "own_schedule.md").read_text()
    own = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "yield" in b)
    assert len([line for line in own.splitlines() if line.strip()]) < 20


def test_page_on_debugging_has_every_error() -> None:
    text = (DOCS / "debugging.md").read_text()
    classes = inspect.getmembers(errors, inspect.isclass)
    ours = [name for name, value in classes if issubclass(value, errors.PipelineError)]
    assert "StageError" in ours
    assert [] == [name for name in ours if f"`{name}`" not in text]


def make_table(p: int, m: int) -> str:
    """All schedules for p ranks and m microbatches, as docs/choose_a_schedule.md shows them."""
    rows = [
        "| schedule | stages | at least | memory | messages | F = I = W | W = ½ | delay 0.1 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in schedules.names():
        generator = schedules.get(name)
        schedule = generator(num_ranks=p, num_microbatches=m)
        if schedule.has_backward:
            v = schedule.num_stages // p
            fewest = generator.min_microbatches(Shape(p, m, v))
            cells = [name, str(v), str(fewest), *_simulated(schedule, v)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _simulated(schedule: Schedule, v: int) -> list[str]:
    sends = [
        action
        for order in add_comms(schedule).orders
        for action in order
        if isinstance(action, Send)
    ]
    reports = [
        simulate(schedule, CostTable.uniform(schedule.num_stages, stages_per_rank=v, **costs))
        for costs in ({}, {"backward_weight": 0.5}, {"delay": 0.1})
    ]
    return [
        f"{reports[0].peak_memory:g}",
        f"{len(sends) / schedule.num_microbatches:g}",
        *map(_bubbles, reports),
    ]


def _bubbles(report: Report) -> str:
    """By makespan, and by span if it differs."""
    rates = [f"{rate * 100:.1f}" for rate in (report.bubble_by_makespan, report.bubble_by_span)]
    return "/".join(dict.fromkeys(rates))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32)])
def test_tables_to_choose_from_are_made_by_the_simulator(p: int, m: int) -> None:
    assert make_table(p, m) in (DOCS / "choose_a_schedule.md").read_text()
