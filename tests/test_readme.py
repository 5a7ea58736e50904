"""What the README says is what the simulator says, and its pictures are what is drawn."""

import json
import re
from pathlib import Path

import pytest

from penstock import schedules, simulate
from penstock.draw import Panel, save

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PICTURES = ROOT / "docs" / "pictures"
# | ZB-V | 2 | 5.9 % | 4 | … |
ROWS = re.findall(r"^\| ([\w-]+) \| (\d) \| ([\d.]+) % \| ([\d.]+) \| .+ \|$", README, flags=re.M)


@pytest.mark.parametrize(("name", "stages", "bubble", "memory"), ROWS)
def test_table_of_schedules_is_made_by_the_simulator(
    name: str, stages: str, bubble: str, memory: str
) -> None:
    schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
    report = simulate(schedule)
    actual = (
        str(schedule.num_stages // 4),
        f"{report.bubble_by_makespan * 100:.1f}",
        f"{report.peak_memory:g}",
    )
    assert (stages, bubble, memory) == actual


def test_table_has_the_first_choice_and_the_baseline() -> None:
    """docs/choose_a_schedule.md has the table of all schedules."""
    assert {"ZB-V", "1F1B"} <= {name for name, *_ in ROWS}


@pytest.mark.parametrize(("file", "dark"), [("schedules.svg", False), ("schedules_dark.svg", True)])
def test_picture_of_the_schedules_is_what_is_drawn(file: str, dark: bool, tmp_path: Path) -> None:
    panels = [
        Panel(name, simulate(schedules.get(name)(num_ranks=4, num_microbatches=8)))
        for name in ("1F1B", "ZB-H1", "ZB-V")
    ]
    save(panels, tmp_path / file, dark=dark)
    assert (PICTURES / file).read_bytes() == (tmp_path / file).read_bytes()


def test_table_of_the_demo_is_that_of_the_run_whose_figures_are_kept() -> None:
    figures = json.loads((PICTURES / "demo.json").read_text())
    for found in figures:
        row = (
            f"| {found['schedule']} | {found['step_s'] * 1e3:.0f} ms "
            f"| {found['tokens_per_s']:,.0f} | {found['measured_bubble'] * 100:.1f} % "
            f"| {found['simulated_bubble'] * 100:.1f} % "
            f"| {figures[0]['step_s'] / found['step_s']:.2f} |"
        )
        assert row in README
    assert figures[0]["losses"] == figures[1]["losses"]
    assert (
        f"the losses of all {len(figures[0]['losses'])} steps are equal to the last bit" in README
    )
