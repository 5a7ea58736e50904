"""What the README says is what the simulator says, and its pictures are what is drawn."""

import json
import re
from pathlib import Path

import pytest

from penstock import CostTable, Schedule, schedules, search, simulate
from penstock.draw import Panel, save
from penstock.ir import Recompute

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


def plan_panels() -> list[Panel]:
    """The searched schedules of the picture; their files are beside it."""
    lengths = [3072, 512, 1024, 2048, 512, 1536, 1024, 2560]
    moved = [1.6, 1.6, 1.6, 1.2]
    drawn = [
        (
            "microbatches of different lengths",
            "uneven",
            CostTable.uniform(4).for_lengths(lengths),
            13 / 3,
        ),
        ("forwards recomputed", "recomputed", CostTable.uniform(4, after_dropping=0.1), 2.0),
        (
            "layers moved away from the head",
            "head",
            CostTable(forward=moved, backward_input=moved, backward_weight=moved),
            4.0,
        ),
    ]
    return [
        Panel(title, simulate(_read_plan(file), costs), caps=(cap,) * 4)
        for title, file, costs, cap in drawn
    ]


def _read_plan(name: str) -> Schedule:
    return Schedule.from_csv((PICTURES / "plans" / f"{name}.csv").read_text())


@pytest.mark.parametrize(("file", "dark"), [("plans.svg", False), ("plans_dark.svg", True)])
def test_picture_of_the_plans_is_what_is_drawn(file: str, dark: bool, tmp_path: Path) -> None:
    save(plan_panels(), tmp_path / file, dark=dark)
    assert (PICTURES / file).read_bytes() == (tmp_path / file).read_bytes()


def test_figures_beside_the_plans_are_simulated() -> None:
    uneven, recomputed, head = (panel.report for panel in plan_panels())
    zb_h1 = schedules.get("ZB-H1")(num_ranks=4, num_microbatches=8)
    in_order = simulate(zb_h1, uneven.costs)
    assert in_order.peak_memory >= uneven.peak_memory * (1 - 1e-9)
    assert f"ZB-H1 takes {in_order.makespan:.3g} with these" in README
    assert f"what was found takes {uneven.makespan:.3g} in the same memory" in README
    assert 2.0 == pytest.approx(recomputed.peak_memory)
    kept = search(recomputed.costs, 4, 8, memory=2, effort=0.1)
    assert f"nothing faster than {kept.time:g} was found" in README
    assert f"on ranks 0 and 1 only, {recomputed.makespan:g}." in README
    again = {action.stage for action in _recomputations(recomputed.timeline.schedule)}
    assert {0, 1} == again
    heavy = [1.0, 1.0, 1.0, 3.0]
    costs = CostTable(forward=heavy, backward_input=heavy, backward_weight=heavy)
    assert f"a step takes {search(costs, 4, 8, memory=4, effort=0.1).time:g}." in README
    assert f"moves layers away from them: {head.makespan:.3g}." in README


def _recomputations(schedule: Schedule) -> list[Recompute]:
    return [a for order in schedule.orders for a in order if isinstance(a, Recompute)]


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
