"""`--gathers` and `--gather-costs`: when sharded stages are gathered, and what that costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from penstock import CostTable, Schedule, schedules, search, simulate
from penstock.cli.gathers_option import read_gathers
from penstock.passes import Gathers, add_gathers

SHAPE = ("-p", 2, "-m", 4)
COSTS = ("--gather-costs", "0.5,0.25,2")
POLICIES = [
    Gathers.once(),
    Gathers.once(ahead=3),
    Gathers.per_need(),
    Gathers.per_need(ahead=0),
    Gathers.at_most(1),
    Gathers.at_most(2, ahead=2),
    Gathers.at_most(2, stages_ahead=2),
    Gathers(most=2, frees_between=True),
]


def make(name: str, num_microbatches: int = 4) -> Schedule:
    return schedules.get(name)(num_ranks=2, num_microbatches=num_microbatches)


def table(num_stages: int) -> CostTable:
    return CostTable.uniform(
        num_stages, stages_per_rank=num_stages // 2, gather=0.5, reduce=0.25, gathered=2.0
    )


def facts(*args: object) -> Any:
    return json.loads("\n".join(run(*args, "--json").lines))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policy_is_read_as_it_is_printed(policy: Gathers) -> None:
    assert policy == read_gathers(str(policy))


def test_only_how_early_stages_are_gathered_may_be_given() -> None:
    assert Gathers.once(ahead=2) == read_gathers("ahead:2")


@pytest.mark.parametrize(
    "text",
    [
        *("", "twice", "at-most", "most:2", "at-most:0", "at-most:x", "ahead:-1"),
        *("once,once", "once,per-need", "once,at-most:2", "ahead:1,ahead:2", "auto,ahead:2"),
        *("ahead:1,stages-ahead:1", "stages-ahead:x"),
    ],
)
def test_policy_that_is_not_one_is_refused(text: str) -> None:
    error = run("simulate", "1F1B", f"--gathers={text}").error
    assert error.startswith(f"--gathers is {text!r}. Expected once, per-need or at-most:K, with or")


@pytest.mark.parametrize("command", ["show", "simulate", "convert"])
def test_auto_is_refused_where_nothing_is_compared(command: str) -> None:
    error = run(command, "1F1B", "--gathers", "auto").error
    assert error.startswith("--gathers is auto, which compares times within a memory. Use it with")


def test_simulate_places_gathers_with_their_costs() -> None:
    report = simulate(add_gathers(make("ZB-V"), Gathers.at_most(1)), table(4))
    [found] = facts("simulate", "ZB-V", *SHAPE, "--gathers", "at-most:1", *COSTS)
    assert (report.makespan, report.peak_memory) == (found["makespan"], found["peak_memory"])
    [plain] = facts("simulate", "ZB-V", *SHAPE, *COSTS)
    assert plain["makespan"] < found["makespan"]


def test_show_draws_gathers() -> None:
    lines = run("show", "ZB-V", *SHAPE, "--gathers", "once", *COSTS).lines
    assert 2 == sum(line.startswith("sharding") for line in lines)
    report = simulate(add_gathers(make("ZB-V"), Gathers.once()), table(4))
    assert lines[1].startswith(f"makespan {report.makespan:.5g} ")


def test_convert_puts_gathers_in_place_of_those_of_a_file() -> None:
    once = run("convert", "ZB-V", *SHAPE, "--gathers", "once").out
    assert add_gathers(make("ZB-V"), Gathers.once()) == Schedule.from_csv(once)
    other = run("convert", "-", "--gathers", "per-need", stdin=once).out
    assert add_gathers(make("ZB-V"), Gathers.per_need()) == Schedule.from_csv(other)
    assert once == run("convert", "-", stdin=once).out
    assert make("ZB-V") == Schedule.from_csv(
        run("convert", "-", "--gathers", "none", stdin=once).out
    )


def test_verify_counts_what_is_gathered() -> None:
    text = add_gathers(make("1F1B"), Gathers.once()).to_csv()
    assert run("verify", "-", "--memory", 4, *COSTS, stdin=text).lines
    error = run("verify", "-", "--memory", 3, *COSTS, stdin=text).error
    assert "the rank holds 4, but its memory is 3" in error


@pytest.mark.parametrize("policy", ["auto", "per-need"])
def test_search_gathers_within_the_memory(policy: str) -> None:
    args = ("search", *SHAPE, "-v", 2, "--effort", 0.02, "--memory", 4, *COSTS)
    found = facts(*args, "--gathers", policy)
    expected = search(table(4), 2, 4, memory=4, effort=0.02, gathers=read_gathers(policy))
    assert (expected.time, expected.schedule.to_csv()) == (found["time"], found["schedule"])
    assert expected.schedule.has_sharding
    assert not Schedule.from_csv(facts(*args, "--gathers", "none")["schedule"]).has_sharding


def test_compare_gathers_for_every_schedule() -> None:
    rows = facts("compare", *SHAPE, "--no-search", "--gathers", "per-need", *COSTS)["schedules"]
    by_name = {row["name"]: row for row in rows}
    for name, num_stages in (("ZB-V", 4), ("1F1B", 2)):
        report = simulate(add_gathers(make(name), Gathers.per_need()), table(num_stages))
        row = by_name[f"{name}, gathered per-need"]
        assert (report.makespan, report.peak_memory) == (row["makespan"], row["peak_memory"])


def test_compare_takes_the_best_policy_within_the_memory_for_each_schedule() -> None:
    args = ("compare", *SHAPE, *COSTS, "--memory", 4, "--gathers")
    best = {row["name"].split(", ")[0]: row for row in facts(*args, "auto")["schedules"]}
    assert best["searched"]["fits"]
    for policy in ("once", "per-need", "at-most:1"):
        for row in facts(*args, policy, "--no-search")["schedules"]:
            mine = best[row["name"].split(", ")[0]]
            assert (not mine["fits"], mine["makespan"]) <= (not row["fits"], row["makespan"])


def test_compare_leaves_out_overlaps_that_need_too_many_stages() -> None:
    left_out = facts("compare", *SHAPE, "--no-search", "--gathers", "at-most:1")["left_out"]
    assert "needs more stages at once than may be gathered" == left_out["DualPipeV"]


def test_compare_searches_only_where_gathers_fit() -> None:
    """With one stage per rank, a rank gathers all of its share at once."""
    args = ("--memory", 2.5, "--gathers", "at-most:1", *COSTS)
    names = [row["name"] for row in facts("compare", *SHAPE, *args)["schedules"]]
    assert 1 == names.count("searched, gathered at-most:1")


@pytest.mark.parametrize("command", ["compare", "search"])
def test_memory_that_is_too_small_for_gathers_is_refused(command: str) -> None:
    args = ("--memory", 2, "--gathers", "once", *COSTS)
    assert "Nothing fits: with once as the policy of gathers" in run(command, *SHAPE, *args).error


def test_costs_of_gathers_stand_in_place_of_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    CostTable.uniform(2, gather=9.0, gathered=9.0).save(path)
    args = ("--costs", path, "--gathers", "once", *SHAPE)
    for name, num_stages in (("1F1B", 2), ("ZB-V", 4)):
        report = simulate(add_gathers(make(name), Gathers.once()), table(num_stages))
        [found] = facts("simulate", name, *args, *COSTS)
        assert (report.makespan, report.peak_memory) == (found["makespan"], found["peak_memory"])
    [kept] = facts("simulate", "1F1B", *args)
    assert kept["peak_memory"] > 9
    [in_bytes] = facts("simulate", "1F1B", *args, "--gather-costs", "0,0,1KiB")
    assert 1024 + 2 == in_bytes["peak_memory"]


@pytest.mark.parametrize("text", ["1", "1,2", "1,2,3,4", "a,1,1", "-1,1,1", "1,1e16,1"])
def test_costs_of_gathers_that_cannot_be_used_are_refused(text: str) -> None:
    error = run("simulate", "1F1B", f"--gather-costs={text}").error
    assert error.startswith(f"--gather-costs is {text!r}. Expected the times of a gather and of a")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("much", "--gather-costs is 'much'. Expected a number above 0"),
        ("8GiB", "--gather-costs is '8GiB', but the bytes that a microbatch holds are unknown"),
    ],
)
def test_memory_of_gathers_that_cannot_be_used_is_refused(memory: str, expected: str) -> None:
    assert run("simulate", "1F1B", f"--gather-costs=1,1,{memory}").error.startswith(expected)
