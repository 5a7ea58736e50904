"""`compare` and `search`: which schedule is best for given costs and memory."""

import json
from pathlib import Path

import pytest
from command_line import run, run_process

from penstock import CostTable, Placement, Recording, Schedule, schedules, search, simulate
from penstock.solver import Problem, lower_bound
from penstock.timeline import RecordedStep


def first_words(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def test_compare_has_all_schedules_that_train_the_best_first() -> None:
    lines = run_process("compare", "--no-search").lines
    trained = [name for name in schedules.names() if name != "ForwardOnly"]
    assert ["schedule", "No", *sorted(trained)] == [
        *first_words([lines[0], lines[-1]]),
        *sorted(first_words(lines[1:-1])),
    ]
    times = [float(line.split()[1]) for line in lines[1:-1]]
    assert sorted(times) == times
    assert ["ZB-V", "25.5", "5.88%", "4", "0.00%", "V,", "2", "per", "rank"] in [
        line.split() for line in lines
    ]
    bounds = "27 (linear), 25.5 (loop, 2 per rank), 25.5 (V, 2 per rank)"
    assert f"No schedule is faster than {bounds}." == lines[-1]


def test_compare_puts_what_does_not_fit_last_with_the_reason() -> None:
    lines = run("compare", "-m", 6, "--memory", 3, "--no-search").lines
    fit = first_words(lines[1:-1])
    assert {"V-Half", "V-Min"} == {*fit[:2]}
    words = {line.split()[0]: line.split() for line in lines}
    assert ["needs", "6", "on", "rank", "0"] == words["GPipe"][-5:]
    assert ["DualPipeV", "needs", "8", "microbatches"] == words["DualPipeV"]


def test_compare_adds_the_best_that_is_found_for_each_number_of_stages() -> None:
    ran = run("compare", "-m", 4, "--costs", "1,1.2,0.8", "--memory", 3, "--json")
    facts = json.loads("\n".join(ran.lines))
    searched = [row for row in facts["schedules"] if row["name"] == "searched"]
    assert {1, 2} == {1 if row["placement"] == "linear" else 2 for row in searched}
    fastest = min(row["makespan"] for row in facts["schedules"] if row["fits"])
    assert fastest == min(row["makespan"] for row in searched)


def test_compare_as_json_has_bounds_by_the_clock_and_the_memory() -> None:
    args = ("--clock", "span", "--memory", "4,4,4,3", "--delay", 0.1, "--no-search")
    facts = json.loads(run("compare", *args, "--json").out)
    assert [4.0, 4.0, 4.0, 3.0] == facts["memory"]
    [row] = [row for row in facts["schedules"] if row["name"] == "1F1B"]
    costs = CostTable.uniform(4, delay=0.1)
    problem = Problem.of(costs, Placement.linear(4), 8, memory=(4, 4, 4, 3), clock="span")
    assert lower_bound(problem) == row["lower_bound"]
    assert row["span"] / row["lower_bound"] - 1 == pytest.approx(row["gap"])
    [excessive] = [row for row in facts["schedules"] if row["name"] == "ZB-H1"]
    assert (False, None) == (excessive["fits"], excessive["gap"])


def compared(costs: CostTable, folder: Path, *args: object) -> dict[str, tuple[str, float]]:
    """What `compare` says of each schedule with a file of costs: placement and makespan."""
    costs.save(folder / "costs.json")
    ran = run("compare", "--costs", folder / "costs.json", "--no-search", "--json", *args)
    rows = json.loads(ran.out)["schedules"]
    return {row["name"]: (row["placement"], row["makespan"]) for row in rows}


def test_compare_takes_the_number_of_stages_from_a_file_of_costs(tmp_path: Path) -> None:
    found = compared(CostTable.uniform(12, stages_per_rank=3), tmp_path)
    assert "loop, 3 per rank" == found["Interleaved1F1B"][0]
    found = compared(CostTable.uniform(12, stages_per_rank=3), tmp_path, "-v", 2)
    assert "loop, 2 per rank" == found["Interleaved1F1B"][0]


def test_costs_of_other_stages_are_shared_out_along_the_model(tmp_path: Path) -> None:
    # As it was before: only schedules with as many stages as the file were compared.
    measured = CostTable(forward=[1, 1, 1, 3], backward_input=[1] * 4, backward_weight=[1] * 4)
    halves = CostTable(
        forward=[0.5] * 6 + [1.5] * 2,
        backward_input=[0.5] * 8,
        backward_weight=[0.5] * 8,
        after_forward=0.5,
        after_input=0.5,
    )
    by_one, by_two = compared(measured, tmp_path), compared(halves, tmp_path)
    assert by_one == by_two
    report = simulate(schedules.get("ZB-V")(num_ranks=4, num_microbatches=8), halves)
    assert ("V, 2 per rank", report.makespan) == by_one["ZB-V"]


def test_file_of_costs_that_4_ranks_cannot_share_has_as_many_ranks_as_stages(
    tmp_path: Path,
) -> None:
    CostTable.uniform(3).save(tmp_path / "costs.json")
    for command in (["compare", "--no-search"], ["simulate", "1F1B"]):
        ran = run(*command, "--costs", tmp_path / "costs.json", "--json")
        facts = json.loads(ran.out)
        assert 3 == (facts if isinstance(facts, dict) else facts[0])["num_ranks"]
    ran = run("search", "--costs", tmp_path / "costs.json", "--effort", 0.01, "--json")
    assert 3 == len(json.loads(ran.out)["schedule"].splitlines())


def test_placement_by_name_is_taken_whatever_the_stages_of_the_file(tmp_path: Path) -> None:
    CostTable.uniform(4).save(tmp_path / "costs.json")
    args = ("--costs", tmp_path / "costs.json", "--placement", "v", "--effort", 0.01, "--json")
    assert "V, 2 per rank" == json.loads(run("search", *args).out)["placement"]


def test_compare_gives_stages_per_rank_to_those_that_take_any() -> None:
    facts = json.loads(run("compare", "-v", 3, "--no-search", "--json").out)
    where = {row["name"]: row["placement"] for row in facts["schedules"]}
    assert ("loop, 3 per rank", "linear") == (where["Interleaved1F1B"], where["1F1B"])


def test_compare_of_an_own_schedule_takes_its_shape(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text(schedules.get("GPipe")(num_ranks=3, num_microbatches=5).to_csv())
    facts = json.loads(run("compare", own, "--no-search", "--json").out)
    assert (3, 5) == (facts["num_ranks"], facts["num_microbatches"])
    times = {row["name"]: row["makespan"] for row in facts["schedules"]}
    assert times["GPipe"] == times[str(own)]


def test_search_finds_prints_and_writes_the_best(tmp_path: Path) -> None:
    path = tmp_path / "best.csv"
    args = ("-m", 4, "--costs", "1,1.2,0.8", "--memory", 3, "--effort", 0.01, "-v", 1)
    ran = run_process("search", *args, "-o", path)
    costs = CostTable.uniform(4, backward_input=1.2, backward_weight=0.8)
    found = search(costs, 4, 4, memory=3, effort=0.01)
    assert found.schedule == Schedule.from_csv(path.read_text())
    assert first_words([str(found).splitlines()[1]]) == ["makespan"]
    limit = next(n for n, line in enumerate(ran.lines) if "limits the step" in line)
    assert len(found.tried) == limit - 3
    assert ran.lines[limit + 1].startswith("What would help: ")
    assert [
        f"best: makespan {found.time:.5g}, bubble {found.report.bubble_by_makespan:.2%}, "
        f"peak memory {found.report.peak_memory:.5g}, linear",
        f"bound: {found.lower_bound:.5g}, gap {found.gap:.2%}",
    ] == ran.lines[limit - 2 : limit]
    assert f"wrote {path}" == ran.lines[-1]


def test_search_of_several_numbers_of_stages_has_the_best_and_the_bound_of_all() -> None:
    shape = ("search", "-m", 4, "--costs", "1,1.2,0.8", "--memory", 2, "--effort", 0.01, "--json")
    one, two, both = (json.loads(run(*shape, *more).out) for more in (["-v", 1], ["-v", 2], []))
    assert two["time"] < one["time"]
    assert (two["time"], two["schedule"]) == (both["time"], both["schedule"])
    assert min(one["lower_bound"], two["lower_bound"]) == both["lower_bound"]
    assert one["tried"] + two["tried"] == both["tried"]


def test_search_takes_what_fits_of_several_numbers_of_stages() -> None:
    """One stage on each rank needs 1 of memory at least, two need half of that each."""
    shape = ("search", "-p", 2, "-m", 2, "--effort", 0.01)
    for memory in (0.4, 1):
        found = run(*shape, "--memory", memory)
        assert found.error.startswith("Nothing fits") if memory < 1 else found.lines


def test_search_as_json_has_the_schedule_and_what_was_tried() -> None:
    ran = run("search", "-m", 4, "--clock", "span", "--json")
    facts = json.loads("\n".join(ran.lines))
    schedule = Schedule.from_csv(facts["schedule"])
    report = simulate(schedule)
    assert ("span", report.span, 0.0, "loop, 2 per rank") == (
        facts["clock"],
        facts["time"],
        facts["gap"],
        facts["placement"],
    )
    assert "1F1B" in [tried["name"] for tried in facts["tried"]]


def test_search_recomputes_if_it_is_asked_to() -> None:
    shape = ("search", "-m", 6, "--placement", "linear", "--memory", 2, "--effort", 0.02, "--json")
    plain, found = (
        json.loads("\n".join(run(*shape, *flag).lines)) for flag in ((), ("--recompute",))
    )
    assert "R" not in plain["schedule"]
    assert "R" in found["schedule"]
    assert found["time"] < plain["time"]
    assert found["lower_bound"] <= found["time"]


def test_search_prints_the_schedule_alone_into_a_pipe() -> None:
    ran = run("search", "-m", 4, "-o", "-")
    assert (4, 4) == (len(ran.lines), Schedule.from_csv(ran.out).num_microbatches)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--placement", "v"], {"V, 2 per rank"}),
        (["--placement", "loop", "-v", "3"], {"loop, 3 per rank"}),
        (["-v", "2"], {"V, 2 per rank", "loop, 2 per rank"}),
        (["--placement", "linear", "--placement", "v"], {"linear", "V, 2 per rank"}),
        ([], {"linear", "V, 2 per rank", "loop, 2 per rank"}),
    ],
)
def test_search_tries_the_placements_that_are_asked_for(
    args: list[str], expected: set[str]
) -> None:
    ran = run("search", "-p", 2, "-m", 2, "--effort", 0.01, "--json", *args)
    assert expected == {tried["placement"] for tried in json.loads(ran.out)["tried"]}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--placement", "linear", "-v", "2"], "--placement is linear, but each rank has 2"),
        (["--json", "-o", "-"], "--json and --output - would both print."),
        (["--placement", "zigzag"], "Invalid value for '--placement'"),
        (["--seconds", "0"], "seconds is 0.0. Expected a finite number above 0."),
        (["--effort", "nan"], "effort is nan. Expected a finite number above 0."),
    ],
)
def test_search_that_cannot_be_done_is_refused(args: list[str], expected: str) -> None:
    assert run("search", *args).error.startswith(expected)


def test_search_that_is_out_of_time_says_so() -> None:
    args = ("-p", 4, "-m", 8, "-v", 2, "--costs", "1,1.2,0.8", "--memory", 3)
    assert "stopped after" in run("search", *args, "--seconds", 1e-6).out


def record(path: Path, name: str) -> None:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    costs = CostTable.uniform(schedule.num_stages, stages_per_rank=2, forward=0.02, delay=0.001)
    Recording((RecordedStep(0, simulate(schedule, costs).timeline),)).save(path)


@pytest.mark.parametrize("command", [["compare", "--no-search"], ["search", "--effort", "0.05"]])
def test_recorded_costs_say_how_many_ranks_and_microbatches_there_are(
    command: list[str], tmp_path: Path
) -> None:
    record(tmp_path / "run.json", "ZB-V")
    lines = run(*command, "--costs", tmp_path / "run.json").lines
    assert "V, 2 per rank" in lines[1] or "loop, 2 per rank" in lines[1]
    assert " ms " in lines[1] or " s " in lines[1]


def test_schedule_with_other_stages_gets_its_share_of_what_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "run.json", "ZB-V")
    ran = run("simulate", "1F1B", "--costs", tmp_path / "run.json", "--json")
    costs = CostTable.uniform(2, forward=0.02, delay=0.001)
    expected = simulate(schedules.get("1F1B")(num_ranks=2, num_microbatches=4), costs)
    assert pytest.approx(expected.makespan) == json.loads(ran.out)[0]["makespan"]


@pytest.mark.parametrize("command", [["compare"], ["search"], ["verify", "-"]])
def test_bytes_of_memory_without_a_file_of_costs_are_refused(command: list[str]) -> None:
    error = run(*command, "--memory", "8GiB").error
    assert error.startswith("--memory is '8GiB', but the bytes that a microbatch holds are")


def test_compare_with_recomputation_is_for_searched_schedules() -> None:
    args = ("compare", "-p", 2, "-m", 4, "--memory", 1, "--json")
    kept, again = (
        {row["name"]: row for row in json.loads(run(*args, *option).out)["schedules"]}
        for option in ([], ["--recompute"])
    )
    assert again["searched"]["makespan"] < kept["searched"]["makespan"]
    assert again["searched"]["lower_bound"] <= again["searched"]["makespan"]
    error = run("compare", "--recompute", "--no-search").error
    assert error.startswith("--recompute and --no-search were both given, but only searched")


def test_schedule_that_recomputes_has_no_gap_to_a_bound_for_others(tmp_path: Path) -> None:
    args = ("-p", 2, "-m", 4, "--memory", 1)
    run("search", *args, "--recompute", "--effort", 0.01, "-o", tmp_path / "again.csv")
    for option, is_known in (("--recompute", True), ("--no-search", False)):
        ran = run("compare", tmp_path / "again.csv", *args, option, "--json")
        [row] = [row for row in json.loads(ran.out)["schedules"] if "again" in row["name"]]
        assert is_known == (row["gap"] is not None)


def test_search_says_what_is_recomputed_and_the_order_of_microbatches() -> None:
    args = ("search", "-p", 2, "--effort", 0.01)
    assert any("recompute" in line for line in run(*args, "--recompute", "--memory", 1).lines)
    lines = run(*args, "--lengths", "3,1,2").lines
    assert any(line.startswith("Microbatches run in the order ") for line in lines)
    facts = json.loads(run(*args, "--lengths", "3,1,2", "--json").out)
    assert [0, 1, 2] == sorted(facts["forward_order"]) == sorted(facts["backward_order"])
    assert not any(facts["recomputed"])


def test_compare_searches_where_only_some_numbers_of_stages_fit() -> None:
    """With recomputation, two stages per rank need less than one, which stopped the command."""
    args = ("compare", "-p", 2, "-m", 2, "--recompute", "--memory", 0.7)
    facts = json.loads(run(*args, "--json").out)
    [row] = [row for row in facts["schedules"] if row["fits"] and row["name"] == "searched"]
    assert any(row["recomputed"])
    assert [0, 1] == sorted(row["forward_order"])
    assert all(other["excess"] for other in facts["schedules"] if not other["fits"])
    assert any(line.startswith("The best searched schedule: ") for line in run(*args).lines)
