"""Every command line of docs/command_line.md does what the page shows."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import run

from penstock import CostTable, schedules, simulate
from penstock.timeline import RecordedStep, Recording

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()


class Example(NamedTuple):
    command: str
    shown: list[str]
    """The first lines that it prints, if the page shows any."""


def examples() -> list[Example]:
    found: list[Example] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Example(line.removeprefix("$ "), []))
            else:
                found[-1].shown.append(line)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the page speaks of, but does not make."""
    schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    costs = CostTable.uniform(4, delay=0.1)
    costs.save(tmp_path / "costs.json")
    CostTable.uniform(4, after_forward=8).save(tmp_path / "full.json")
    CostTable.uniform(4, backward_input=1.5, after_forward=4).save(tmp_path / "half.json")
    step = RecordedStep(0, simulate(schedule, costs).timeline)
    Recording((step,)).save(tmp_path / "run.json")
    [model] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_model.py").write_text(model)
    return tmp_path


def test_every_command_line_of_the_page_prints_what_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other: some read what others wrote."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # Puts sys.path back after the test.
    for command, shown in examples():
        first, *others = (shlex.split(part)[1:] for part in command.split("|"))
        if first[0] == "search" and "--effort" not in first and not shown:
            first += ["--effort", "0.1"]  # Which schedule it finds is not on the page.
        ran = run(*first)
        for args in others:
            ran = run(*args, stdin=ran.out)
        assert (0, "") == (ran.code, ran.err), command
        assert shown == ran.out.splitlines()[: len(shown)], command
        assert ran.out, command


def test_page_shows_every_command() -> None:
    named = set(re.findall(r"^\| `penstock ([\w-]+)`", PAGE, flags=re.MULTILINE))
    used = set(
        re.findall(r"penstock ([\w-]+)", " ".join(example.command for example in examples()))
    )
    # Those that train are shown by docs/training.md, the studio by docs/studio.md, and `run` by
    # docs/unchanged_programs.md.
    assert named == used | {"demo", "export", "run", "studio", "train"}
