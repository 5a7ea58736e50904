"""`plan`: a model of the user's goes in."""

import json
import sys
from pathlib import Path

import pytest
from command_line import run

from penstock import CostTable, Schedule, simulate
from penstock.cli import main
from penstock.errors import OptionError

MODULE = """
import torch
from torch import nn


def make():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        return model, torch.zeros(8, 16)


def make_with_keywords():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

        def forward(self, x, *, scale):
            return self.layers(x) * scale

    return Scaled(), (torch.zeros(8, 16),), {"scale": torch.ones(8, 1)}


def make_with_loss():
    return *make_with_keywords(), nn.functional.mse_loss


def make_with_target():
    def loss_fn(output, target):
        return nn.functional.mse_loss(output, target)

    return *make_with_keywords(), loss_fn, torch.zeros(8, 16)


def make_without_target():
    return make_with_target()[:4]


def fail():
    raise KeyError("width")


def make_misfit():
    return make()[0], (torch.zeros(8, 15, device="meta"),)


def make_number():
    return 3


def make_reversed():
    return torch.zeros(8, 16), make()[0]


def make_word():
    return make()[0], "batch"


size = 4
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # Puts sys.path back after the test.
    Path("planned_model.py").write_text(MODULE)
    Path("failing_model.py").write_text("import json\n\njson.loads('{')\n")
    Path("lacking_model.py").write_text("import turbine\n")
    Path("unfinished_model.py").write_text("def make(:\n")
    for name in ("planned", "failing", "lacking", "unfinished", "leaving"):
        monkeypatch.delitem(sys.modules, f"{name}_model", raising=False)
    Path("leaving_model.py").write_text("raise SystemExit(3)\n")


def test_plan_saves_the_costs_with_which_its_schedule_can_be_drawn() -> None:
    args = ("-p", 2, "-m", 4, "--effort", 0.01)
    files = ("-o", "best.csv", "--save-costs", "costs.json")
    facts = json.loads(run("plan", "planned_model:make", *args, *files, "--json").out)
    [simulated] = json.loads(run("simulate", "best.csv", "--costs", "costs.json", "--json").out)
    assert facts["rows"][0]["time"] == simulated["makespan"]
    error = run("plan", "planned_model:make", "--save-costs", "missing/costs.json").error
    assert error.startswith("--save-costs is missing/costs.json, but there is no folder missing.")


def test_plan_prints_the_best_rows_and_writes_the_schedule() -> None:
    args = ("-p", 2, "-m", "2,4", "-v", 1, "--memory", "1MiB", "--speed", 1e9, "--effort", 0.01)
    lines = run("plan", "planned_model:make", *args, "-o", "best.csv").lines
    header = "schedule placement microbatches size time bubble memory gap"
    assert header.split() == lines[0].split()
    assert {"2", "4"} == {line.split()[2] for line in lines[1:3]}
    assert "µs" in lines[1]
    cut = next(n for n, line in enumerate(lines) if line.startswith("The model is cut before "))
    assert "Nothing is recomputed." == lines[cut + 1]
    assert "limits the step" in lines[cut + 2]
    assert "wrote best.csv" == lines[-1]
    assert 2 == Schedule.from_csv(Path("best.csv").read_text()).num_ranks


def test_plan_as_json_of_a_file_with_keyword_arguments() -> None:
    name = "planned_model.py:make_with_keywords"
    ran = run("plan", name, "-p", 2, "-m", "4,3", "-v", 1, "--effort", 0.01, "--json")
    facts = json.loads("\n".join(ran.lines))
    [row] = facts["rows"]
    assert (4, 2, "linear") == (row["num_microbatches"], row["mb_size"], row["placement"])
    assert Schedule.from_csv(row["schedule"]).num_microbatches == 4
    assert 1 == len(row["cut_points"])
    assert [3] == [choice["num_microbatches"] for choice in facts["left_out"]]
    table = run("plan", name, "-p", 2, "-m", "4,3", "-v", 1, "--effort", 0.01).lines
    [left_out] = [line for line in table if line.startswith("left out: ")]
    assert "3 microbatches, linear: a batch of 8 cannot be cut" in left_out
    assert "limits the step" in facts["limit"]
    assert all(0 < help["gain"] < 1 for help in facts["helps"])


def test_plan_for_lengths_prints_the_order_of_the_microbatches() -> None:
    args = ("-p", 2, "-v", 1, "--lengths", "512,64,128,1024", "--effort", 0.02)
    lines = run("plan", "planned_model:make", *args).lines
    [row] = json.loads(run("plan", "planned_model:make", *args, "--json").out)["rows"]
    assert [0, 1, 2, 3] == sorted(row["forward_order"])
    order = ", ".join(map(str, row["forward_order"]))
    assert any(line.startswith(f"Microbatches run in the order {order}, and") for line in lines)
    assert row["lower_bound"] <= row["time"]
    slower = json.loads(run("plan", "planned_model:make", *args, "--work", "1,1", "--json").out)
    assert slower["rows"][0]["time"] > row["time"]


def test_function_may_return_a_loss_too() -> None:
    """It takes time, and memory for what it holds."""
    times, memory = zip(
        *(
            (row["time"], max(row["memory"]))
            for name in ("make_with_keywords", "make_with_loss", "make_with_target")
            for options in [("-m", 4, "-p", 1, "-v", 1, "--effort", 0.01, "--json")]
            for ran in [run("plan", f"planned_model:{name}", *options)]
            for row in json.loads("\n".join(ran.lines))["rows"]
        ),
        strict=True,
    )
    assert times[0] < times[1] == times[2]
    assert memory[0] < memory[1] == memory[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("planned_model", "'planned_model' does not name a function. Expected module:function"),
        (":make", "':make' does not name a function."),
        ("planed_model:make", "The module 'planed_model' is neither in "),
        ("nowhere.inside:make", "The module 'nowhere.inside' is neither in "),
        ("planned_model:mke", "planned_model has no 'mke'. Did you mean make?"),
        ("planned_model:size", "planned_model:size is a int. Expected a function"),
        ("planned_model:fail", "planned_model:fail failed: KeyError: 'width' ("),
        ("planned_model:make_number", "planned_model:make_number returned int. Expected (model,"),
        ("planned_model:make_reversed", "planned_model:make_reversed returned (Tensor, Sequenti"),
        ("planned_model:make_word", "planned_model:make_word returned a str as the arguments"),
        ("planned_model:make_without_target", "the target of loss_fn, which is make_with_target."),
        ("planned_model:make_misfit", "Sequential cannot be traced: RuntimeError"),
        ("failing_model:make", "failing_model cannot be imported: JSONDecodeError: Expecting"),
        ("lacking_model:make", "lacking_model cannot be imported: ModuleNotFoundError: No modu"),
        ("unfinished_model:make", "unfinished_model cannot be imported: SyntaxError: "),
        ("leaving_model:make", "leaving_model cannot be imported: SystemExit: 3"),
    ],
)
def test_function_that_gives_no_model_is_told_in_one_line(name: str, expected: str) -> None:
    ran = run("plan", name, "-m", 4)
    assert (1, "") == (ran.code, ran.out)
    assert ran.error.startswith(expected)


def test_error_of_the_function_names_its_line(tmp_path: Path) -> None:
    line = MODULE.splitlines().index('    raise KeyError("width")') + 1
    path = tmp_path / "planned_model.py"
    assert run("plan", "planned_model:fail").error.endswith(f"({path}, line {line})")


def test_error_that_a_library_raises_names_the_line_that_called_it(tmp_path: Path) -> None:
    path = tmp_path / "failing_model.py"
    assert run("plan", "failing_model:make").error.endswith(f"({path}, line 3)")


def test_error_of_the_function_is_the_cause_that_debug_shows() -> None:
    with pytest.raises(OptionError) as raised:
        main(["plan", "planned_model:fail", "--debug"])
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--memory", "1KiB", "-m", "8"], "No plan fits: memory is 1024 on each rank. The small"),
        (["--memory", "lots"], "--memory is 'lots'. Expected a number above 0"),
        (["-m", "4,x"], "--microbatches is '4,x'. Expected whole numbers above 0"),
        (["-v", "0"], "--stages-per-rank is '0'. Expected whole numbers above 0"),
        (["--json", "-o", "-"], "--json and --output - would both print."),
        (["--measure", "--speed", "1e9"], "speed is 1000000000.0. It is for counted costs"),
        (["-o", "missing/best.csv"], "--output is missing/best.csv, but there is no folder"),
    ],
)
def test_option_that_cannot_be_used_is_told_in_one_line(args: list[str], expected: str) -> None:
    assert run("plan", "planned_model:make", *args).error.startswith(expected)


LEVELS = ("plan", "--level", "1=full.json", "--level", "half=half.json")
SIZES = ("--batch", 8, "--mb-size", 1)


@pytest.fixture
def _levels() -> None:
    CostTable.uniform(4, after_forward=8.0, after_input=4.0).save("full.json")
    CostTable.uniform(4, backward_input=1.5, after_forward=4.0, after_input=4.0).save("half.json")


@pytest.mark.usefixtures("_levels")
def test_plan_of_levels_prints_the_level_of_each_stage() -> None:
    args = (*LEVELS, *SIZES, "-m", 8, "--memory", 16, "--effort", 0.1)
    header, row, bound, *_ = run(*args).lines
    assert "levels" == header.split()[-1]
    assert row.endswith("  16  0.00%  0-1: half, 2-3: 1")  # Without a unit, as in the files.
    assert bound.startswith("No schedule for any of the 16 choices is faster than")
    files = ("-o", "best.csv", "--save-costs", "mixed.json", "--json")
    [fact] = json.loads(run(*args, *files).out)["rows"]
    assert ["half", "half", 1.0, 1.0] == fact["levels"]
    schedule = Schedule.from_csv(Path("best.csv").read_text())
    costs = CostTable.load("mixed.json")
    assert (4.0, 4.0, 8.0, 8.0) == costs.after_forward
    assert fact["time"] == simulate(schedule, costs).makespan


@pytest.mark.usefixtures("_levels")
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["plan"], "Nothing to plan was given. Expected MODULE:FUNCTION, for a model, or --level"),
        ([*LEVELS, "planned_model:make"], "planned_model:make and --level were both given."),
        ([*LEVELS, "--mb-size", 1], "--batch is missing. Give it with --level"),
        ([*LEVELS, "--batch", 8], "--mb-size is missing. Give it with --level"),
        (["plan", "planned_model:make", "--batch", 8], "--batch is 8. It is for --level: leave"),
        (["plan", "--level", "full.json", *SIZES], "--level is 'full.json'. Expected a level and"),
        ([*LEVELS, *SIZES, "--level", "1.0=half.json"], "--level holds 1.0 twice. Give each"),
        (["plan", "--level", "1=none.json", *SIZES], "none.json cannot be read: No such file"),
        ([*LEVELS, *SIZES, "--measure"], "measure is True. It is for a model, but costs were"),
    ],
)
def test_levels_that_cannot_be_planned_are_told_in_one_line(
    args: list[object], expected: str
) -> None:
    assert run(*args).error.startswith(expected)
