"""`--lengths` and `--work`: microbatches of different sizes."""

import json
from pathlib import Path

import pytest
from command_line import run

from penstock import CostTable, schedules, simulate
from penstock.costs import Work
from penstock.timeline import RecordedStep, Recording

LENGTHS = "512,2048,1024,512"


def expected(work: Work | None = None) -> float:
    costs = CostTable.uniform(2, delay=0.25).for_lengths([512, 2048, 1024, 512], work=work)
    return simulate(schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4), costs).makespan


def test_simulate_takes_as_many_microbatches_as_lengths() -> None:
    ran = run("simulate", "ZB-H1", "-p", 2, "--delay", 0.25, "--lengths", LENGTHS, "--json")
    [facts] = json.loads("\n".join(ran.lines))
    assert (4, expected()) == (facts["num_microbatches"], pytest.approx(facts["makespan"]))


def test_work_is_per_token_and_per_squared_length() -> None:
    given = "--lengths", LENGTHS, "--work", "1,0.001"
    ran = run("simulate", "ZB-H1", "-p", 2, "--delay", 0.25, *given, "--json")
    [facts] = json.loads("\n".join(ran.lines))
    assert expected(Work(1, 0.001)) == pytest.approx(facts["makespan"])


def test_show_draws_a_longer_microbatch_wider() -> None:
    lines = run("show", "GPipe", "-p", 1, "--lengths", "1,3", "--width", 80).lines
    row = next(line for line in lines if line.startswith("rank 0"))
    assert 3 * (row.index("F1") - row.index("F0")) == row.index("B0") - row.index("F1")


def test_costs_of_a_file_may_have_scales_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    CostTable.uniform(2, time_scale=[1, 2, 3]).save(path)
    line = run("simulate", "1F1B", "-p", 2, "--costs", path).lines[0]
    assert "1F1B: 2 ranks, 2 stages (linear), 3 microbatches, 12 actions" == line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "512,x"], "--lengths is '512,x'. Expected whole numbers above 0"),
        (["--work", "1,2"], "--work is 1,2, but there are no lengths. Give --lengths too."),
        (["--lengths", "1,2", "--work", "1"], "--work is '1'. Expected the work per token and per"),
        (["--lengths", "1,2", "--work", "0,0"], "--work is '0,0'. Expected the work per token"),
        (
            ["--lengths", "1,2", "-m", 3],
            "--microbatches is 3, but 2 microbatches of different sizes are given. Leave it out.",
        ),
    ],
)
def test_lengths_that_cannot_be_meant_are_refused(options: list[str], message: str) -> None:
    assert run("simulate", "1F1B", *options).error.startswith(message)


def test_file_with_another_number_of_microbatches_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(schedules.get("1F1B")(num_ranks=2, num_microbatches=4).to_csv())
    error = run("simulate", path, "--lengths", "1,2").error
    assert error.startswith("2 microbatches of different sizes are given, but the schedule has 4.")


def test_recording_of_other_microbatches_may_be_planned_for_lengths(tmp_path: Path) -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=8)
    report = simulate(schedule, CostTable.uniform(2))
    Recording((RecordedStep(0, report.timeline),)).save(tmp_path / "run.json")
    ran = run("simulate", "ZB-H1", "--costs", tmp_path / "run.json", "--lengths", "1,2", "--json")
    assert 2 == json.loads(ran.out)[0]["num_microbatches"]


def test_lengths_beside_scales_or_another_schedule_are_refused(tmp_path: Path) -> None:
    CostTable.uniform(2).for_lengths([1, 2, 3]).save(tmp_path / "scaled.json")
    error = run("search", "-p", 2, "--costs", tmp_path / "scaled.json", "--lengths", "5,6").error
    assert error.startswith("--lengths were given, but the costs have scales for 3 microbatches")
    own = tmp_path / "own.csv"
    own.write_text(schedules.get("1F1B")(num_ranks=2, num_microbatches=8).to_csv())
    error = run("verify", own, "--lengths", "512,1024", "--memory", 8).error
    assert error.startswith(f"{own}: The costs are for 2 microbatches of different sizes")
    error = run("compare", own, "--lengths", "512,1024", "--no-search").error
    assert error.startswith("2 microbatches of different sizes are given, but the schedule has 8.")
