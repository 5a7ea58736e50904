"""`show`, `simulate`, `verify` and `convert`: a schedule goes in, and something is told of it."""

import json
from pathlib import Path

import pytest
from command_line import run, run_process

from penstock import CostTable, Schedule, schedules, simulate
from penstock.passes import add_comms, split_backward
from penstock.timeline import RecordedStep, Recording
from penstock.torch_version import TESTED


def make(name: str, num_ranks: int = 4, num_microbatches: int = 8) -> Schedule:
    return schedules.get(name)(num_ranks=num_ranks, num_microbatches=num_microbatches)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text(make("1F1B", 2, 4).to_csv())
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    costs = CostTable.uniform(2, forward=0.01, backward_input=0.02, backward_weight=0.01)
    timeline = simulate(make("ZB-H1", 2, 4), costs).timeline
    path = tmp_path / "run.json"
    Recording((RecordedStep(0, timeline),)).save(path)
    return path


def test_show_draws_each_schedule_with_what_the_simulator_says_of_it() -> None:
    ran = run_process("show", "zb-v", "1F1B")
    assert "ZB-V" == ran.lines[0]
    assert "makespan 25.5 (bubble 5.9%), span 24 (bubble 0.0%), peak memory 4" == ran.lines[1]
    assert {"1F1B", "makespan 33 (bubble 27.3%), span 33 (bubble 27.3%), peak memory 4"} <= {
        *ran.lines
    }


def test_show_simulates_with_the_costs_and_the_delay() -> None:
    costs = CostTable.uniform(4, forward=1, backward_input=2, backward_weight=0.5, delay=0.25)
    expected = simulate(make("1F1B"), costs).makespan
    line = run("show", "1F1B", "--costs", "1,2,0.5", "--delay", "0.25").lines[1]
    assert line.startswith(f"makespan {expected:.5g} ")


def test_show_is_as_wide_as_asked() -> None:
    assert 70 >= max(map(len, run("show", "1F1B", "--width", 70).lines))


def test_show_gives_names_beside_a_file_the_shape_of_the_file(csv: Path) -> None:
    lines = run("show", csv, "GPipe", "Interleaved1F1B", "-v", 3).lines
    assert 3 == sum(line.startswith("makespan ") for line in lines)
    assert 3 * 2 * 2 == sum(line.startswith("rank ") for line in lines)  # Lanes, and memory.


def test_show_of_a_recording_is_measured_with_the_simulated_one_beneath(recording: Path) -> None:
    lines = run("show", recording, "1F1B").lines
    assert [f"{recording}, measured", "1F1B"] == [
        line for line in lines if "measured" in line or line == "1F1B"
    ]
    assert "makespan 180 ms" in lines[1]
    expected = simulate(make("1F1B", 2, 4), Recording.load(recording).costs()).makespan
    assert any(line.startswith(f"makespan {expected * 1000:.4g} ms") for line in lines)
    assert 2 == sum(line.startswith("simulated ") for line in lines)


@pytest.mark.parametrize("suffix", ["svg", "html", "json"])
def test_show_writes_a_file_and_says_so(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"drawn.{suffix}"
    assert [f"wrote {path}"] == run("show", "1F1B", "-p", 2, "-m", 2, "-o", path).lines
    assert "F" in path.read_text()


def test_show_draws_a_dark_picture(tmp_path: Path) -> None:
    light, dark = tmp_path / "light.svg", tmp_path / "dark.svg"
    shape = ("-p", 2, "-m", 2)
    assert [f"wrote {light}"] == run("show", "1F1B", *shape, "-o", light).lines
    assert [f"wrote {dark}"] == run("show", "1F1B", *shape, "-o", dark, "--dark").lines
    assert light.read_text() != dark.read_text()


@pytest.mark.parametrize("given", [[], ["-o", "page.html"]])
def test_dark_is_refused_for_what_is_no_picture(given: list[str]) -> None:
    assert (
        "--dark is for pictures. Give --output a file"
        in run("show", "1F1B", "--dark", *given).error
    )


def test_suffix_that_is_no_drawing_is_refused(tmp_path: Path) -> None:
    assert "ends in .gif" in run("show", "1F1B", "-o", tmp_path / "a.gif").error


def test_simulate_tells_what_each_rank_does() -> None:
    assert [
        "ZB-H1: 2 ranks, 2 stages (linear), 4 microbatches, 24 actions",
        "makespan 13 (bubble 7.7%), span 13 (bubble 7.7%), peak memory 2",
        "rank  stages  busy  idle  warm-up  steady  cool-down  peak memory",
        "   0  0         12     1        1       0          0            2",
        "   1  1         12     1        1       0          0            2",
    ] == run("simulate", "ZB-H1", "-p", 2, "-m", 4).lines


def test_simulate_as_json_has_all_of_the_report() -> None:
    report = simulate(make("ZB-V"), CostTable.uniform(8, stages_per_rank=2, backward_weight=0.5))
    ran = run_process("simulate", "ZB-V", "--costs", "1,1,0.5", "--json")
    [facts] = json.loads("\n".join(ran.lines))
    assert ("ZB-V", 4, 8, 8, "V, 2 per rank") == (
        facts["name"],
        facts["num_ranks"],
        facts["num_stages"],
        facts["num_microbatches"],
        facts["placement"],
    )
    for name in ("makespan", "span", "bubble_by_makespan", "bubble_by_span", "peak_memory"):
        assert getattr(report, name) == facts[name]
    for rank, told in zip(report.ranks, facts["ranks"], strict=True):
        assert rank.idle._asdict() == told["idle"]
        assert (rank.busy, rank.peak_memory) == (told["busy"], told["peak_memory"])
        assert (rank.first_start, rank.last_end) == (told["first_start"], told["last_end"])
    assert [0, 7] == facts["ranks"][0]["stages"]


def test_simulate_lets_messages_block_if_asked() -> None:
    costs = CostTable.uniform(4, delay=1.0)
    expected = simulate(make("1F1B"), costs, blocking=True).makespan
    [facts] = json.loads(run("simulate", "1F1B", "--delay", 1, "--blocking", "--json").out)
    assert expected == facts["makespan"]
    assert simulate(make("1F1B"), costs).makespan < expected


def test_simulate_of_several_tells_of_each(csv: Path) -> None:
    both = json.loads(run("simulate", csv, "GPipe", "--json").out)
    assert [(str(csv), 2, 4), ("GPipe", 2, 4)] == [
        (facts["name"], facts["num_ranks"], facts["num_microbatches"]) for facts in both
    ]
    assert 2 == sum("makespan" in line for line in run("simulate", csv, "GPipe").lines)


def test_simulate_of_a_recording_uses_the_costs_that_were_measured(recording: Path) -> None:
    assert "makespan 180 ms" in run("simulate", recording).lines[1]
    [facts] = json.loads(run("simulate", recording, "--json").out)
    assert Recording.load(recording).simulated().makespan == facts["makespan"]
    [facts] = json.loads(run("simulate", recording, "--costs", "1,1,1", "--json").out)
    assert 13.0 == facts["makespan"]


def test_simulate_reads_a_schedule_from_the_pipe() -> None:
    ran = run("simulate", "-", stdin=make("GPipe", 2, 2).to_csv())
    assert "standard input: 2 ranks, 2 stages (linear), 2 microbatches, 8 actions" == ran.lines[0]


def test_verify_says_ok_with_what_it_saw(csv: Path) -> None:
    shape = "2 ranks, 2 stages (linear), 4 microbatches, 16 actions"
    assert [f"{csv}: ok: {shape}"] == run_process("verify", csv).lines
    assert [f"standard input: ok: {shape}"] == run("verify", "-", stdin=csv.read_text()).lines


def test_verify_tells_each_file_that_cannot_be_run_and_exits_with_1(
    csv: Path, tmp_path: Path
) -> None:
    twice, cell = tmp_path / "twice.csv", tmp_path / "cell.csv"
    twice.write_text("0F0,0F0,0B0\n1F0,1B0\n")
    cell.write_text("0F0,0X0\n")
    ran = run_process("verify", twice, csv, cell)
    assert (1, 1) == (ran.code, ran.out.count(": ok: "))
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: {twice}: rank 0, position 1: 0F0 repeats")
    assert second.startswith(f"error: {cell}: line 1, cell 2: '0X0' is not an action.")


def test_verify_checks_the_memory_in_microbatches_or_by_the_costs(
    csv: Path, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    CostTable.uniform(2, after_forward=1024).save(costs)
    assert run("verify", csv, "--memory", 2).lines
    assert "the rank holds 2, but its memory is 1.5" in run("verify", csv, "--memory", 1.5).error
    assert run("verify", csv, "--memory", "2KiB,1KiB", "--costs", costs).lines
    assert "the rank holds 2048" in run("verify", csv, "--memory", "1KiB", "--costs", costs).error


def test_verify_counts_long_microbatches_for_more_memory(csv: Path) -> None:
    """Rank 0 holds microbatches 0 and 1, or later two others: at most 1,536 of 640 tokens."""
    lengths = ("--lengths", "512,512,1024,512")
    assert run("verify", csv, "--memory", 2.4, *lengths).lines
    assert (
        "the rank holds 2.4, but its memory is 2.3"
        in run("verify", csv, "--memory", 2.3, *lengths).error
    )
    assert (
        "--lengths is 5,6, but only memory grows with it. Give --memory."
        in run("verify", csv, "--lengths", "5,6").error
    )
    assert (
        "are for 2 microbatches of different sizes, but there are 4"
        in run("verify", csv, "--memory", 2, "--lengths", "5,6").error
    )


def test_convert_writes_what_torch_reads(csv: Path) -> None:
    pytest.importorskip("torch.distributed.pipelining")
    from torch.distributed.pipelining.schedules import _Action

    out = run("convert", "ZB-V", "--comms").out
    assert Schedule.from_csv(out) == add_comms(make("ZB-V"))
    assert out == "".join(
        ",".join(str(_Action.from_str(cell)) for cell in line.split(",")) + "\n"
        for line in out.splitlines()
    )


def test_convert_writes_waits_for_the_torch_that_needs_them() -> None:
    args = ("convert", "ZB-V", "--comms", "--gathers", "once")
    schedule = Schedule.from_csv(run(*args).out)
    assert (
        schedule.to_csv() == run(*args, "--torch", "2.13").out == run(*args, "--torch", "2.14").out
    )
    out = run(*args, "--torch", "2.15").out
    assert schedule.to_csv(has_waits=True) == out
    assert schedule == Schedule.from_csv(out)
    started = sum("SEND" in cell or "REDUCE" in cell for cell in out.replace("\n", ",").split(","))
    assert started == 2 * out.count("WAIT")


def test_convert_keeps_what_it_is_not_asked_to_change(csv: Path) -> None:
    assert csv.read_text() == run_process("convert", csv).out
    with_comms = add_comms(make("ZB-H1")).to_csv()
    assert with_comms == run("convert", "-", stdin=with_comms).out


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--comms", add_comms(make("1F1B"))),
        ("--no-comms", make("1F1B")),
        ("--split", split_backward(make("1F1B"))),
        ("--fuse", make("1F1B")),
    ],
)
def test_convert_changes_what_is_asked(option: str, expected: Schedule) -> None:
    assert expected.to_csv() == run("convert", "1F1B", option).out


def test_convert_goes_there_and_back() -> None:
    plain = make("1F1B").to_csv()
    there = run("convert", "-", "--comms", "--split", stdin=plain).out
    assert "SEND_B" in there
    assert "W" in there
    assert run("convert", "1F1B", "--comms").out == run("convert", "-", "--fuse", stdin=there).out
    assert plain == run("convert", "-", "--no-comms", "--fuse", stdin=there).out


def test_convert_writes_a_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "zb_v.csv"
    shape = "2 ranks, 4 stages (V, 2 per rank), 3 microbatches, 36 actions"
    assert [f"wrote {path}: {shape}"] == run("convert", "ZB-V", "-p", 2, "-m", 3, "-o", path).lines
    assert make("ZB-V", 2, 3) == Schedule.from_csv(path.read_text())


def test_convert_knows_each_tested_version_of_torch() -> None:
    with_waits = [
        "WAIT_SEND_F" in run("convert", "1F1B", "-p2", "-m2", "--comms", "--torch", version).out
        for version in TESTED
    ]
    assert [False, False, True] == with_waits


def test_convert_says_that_torch_would_not_divide_the_gradients() -> None:
    assert "add --gathers once" in run("convert", "1F1B", "--comms").err
    assert "" == run("convert", "1F1B", "--comms", "--gathers", "once").err
    assert "" == run("convert", "1F1B").err


def test_convert_takes_the_schedule_of_a_recording(recording: Path) -> None:
    assert make("ZB-H1", 2, 4).to_csv() == run("convert", recording, "-o", "-").out
