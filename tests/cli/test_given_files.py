"""Files and options that cannot be used: each is told in one line."""

import os
from pathlib import Path

import pytest
from command_line import run

from penstock import CostTable, Recording, schedules, simulate
from penstock.timeline import RecordedStep


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    Path("good.csv").write_text(one.to_csv())
    Path("other.csv").write_text(schedules.get("1F1B")(num_ranks=2, num_microbatches=8).to_csv())
    Path("inference.csv").write_text(
        schedules.get("ForwardOnly")(num_ranks=4, num_microbatches=8).to_csv()
    )
    Path("broken.csv").write_text("0F0,0B0\n1F0,1Q0\n")
    Path("twice.csv").write_text("0F0,0F0,0B0\n")
    Path("empty.csv").write_text("")
    Path("binary.csv").write_bytes(b"0F0\xff\xfe")
    Path("table.json").write_text('{"format": "another"}')
    Path("recording.json").write_text('{"format": "penstock recording", "version": 99}')
    Path("folder.csv").mkdir()
    for num_stages in (3, 4, 8):
        CostTable.uniform(num_stages).save(f"costs{num_stages}.json")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("missing.csv", "missing.csv cannot be read: No such file or directory."),
        ("folder.csv", "folder.csv cannot be read: Is a directory."),
        ("binary.csv", "binary.csv is not valid UTF-8 (byte 3)."),
        ("broken.csv", "broken.csv: line 2, cell 2: '1Q0' is not an action."),
        ("twice.csv", "twice.csv: rank 0, position 1: 0F0 repeats"),
        ("empty.csv", "empty.csv: line 1, cell 1: the text is empty."),
        ("recording.json", "recording.json: The text is of version 99."),
        ("-", "standard input: line 1, cell 1: the text is empty."),
    ],
)
def test_file_that_holds_no_schedule(file: str, expected: str) -> None:
    ran = run("verify", file)
    assert (1, "") == (ran.code, ran.out)
    assert ran.error.startswith(expected)


@pytest.mark.parametrize("command", ["show", "simulate", "convert", "compare"])
def test_file_is_read_alike_by_every_command(command: str) -> None:
    assert run("verify", "twice.csv").error == run(command, "twice.csv").error


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ("1,1", "--costs is '1,1', which is neither a file nor three numbers."),
        ("missing.json", "--costs is 'missing.json', which is neither a file nor"),
        ("-1,1,1", "--costs is -1,1,1. Expected times that are not negative, up to 1e+15."),
        ("good.csv", "The costs in good.csv cannot be read: The text is not JSON"),
        ("table.json", "The costs in table.json cannot be read: The text is of the format"),
        ("recording.json", "The costs in recording.json cannot be read: The text is of ver"),
        ("binary.csv", "binary.csv is not valid UTF-8"),
        ("folder.csv", "folder.csv cannot be read: Is a directory."),
    ],
)
def test_costs_that_cannot_be_used(costs: str, expected: str) -> None:
    assert run("simulate", "1F1B", f"--costs={costs}").error.startswith(expected)


def test_delay_that_is_given_stands_in_place_of_those_of_the_file() -> None:
    slow = run("simulate", "1F1B", "--costs", "costs4.json", "--delay", 1).lines
    assert run("simulate", "1F1B", "--delay", 1).lines == slow
    assert run("simulate", "1F1B").lines != slow


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("missing/a.csv", "--output is missing/a.csv, but there is no folder missing."),
        ("folder.csv", "--output is folder.csv, which is a folder."),
        ("/proc/a.csv", "/proc/a.csv cannot be written: No such file or directory."),
    ],
)
def test_output_that_cannot_be_written(output: str, expected: str) -> None:
    assert run("convert", "good.csv", "-o", output).error.startswith(expected)


def test_output_of_a_search_is_checked_before_it() -> None:
    error = run("search", "-m", 2, "-o", "missing/a.csv").error
    assert error.startswith("--output is missing/a.csv, but there is no folder missing.")


def test_output_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere.
    expected = "--output is folder.csv/a.csv, which cannot be written."
    assert run("convert", "1F1B", "-o", "folder.csv/a.csv").error.startswith(expected)


@pytest.mark.parametrize(
    "args",
    [
        ["convert", "good.csv", "-o", "good.csv"],
        ["convert", "good.csv", "-o", "./folder.csv/../good.csv"],
        ["search", "--costs", "costs4.json", "-o", "costs4.json"],
        ["show", "good.csv", "-o", "good.csv"],
    ],
)
def test_output_over_the_input_is_refused(args: list[str]) -> None:
    before = Path("good.csv").read_text(), Path("costs4.json").read_text()
    assert f"--output is {args[-1]}, which is also an input." in run(*args).error
    assert before == (Path("good.csv").read_text(), Path("costs4.json").read_text())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["-p", "8"], "--ranks is 8, but good.csv has 4 ranks. Leave it out"),
        (["-m", "9"], "--microbatches is 9, but good.csv has 8 microbatches. Leave it out"),
        (["-v", "2"], "--stages-per-rank is 2, but good.csv has its own stages. Leave it out"),
    ],
)
def test_shape_that_is_not_the_files_is_refused(args: list[str], expected: str) -> None:
    assert run("simulate", "good.csv", *args).error.startswith(expected)
    assert run("simulate", "good.csv", "-p", 4, "-m", 8).lines


@pytest.mark.parametrize("memory", ["much", "4x", "0", "1e12TB", "4,,4"])
def test_memory_that_is_no_amount_is_refused(memory: str) -> None:
    assert (
        "Expected a number above 0, up to 1e+15, with or without a unit"
        in run("compare", "--no-search", f"--memory={memory}").error
    )


def test_memory_for_another_number_of_ranks_is_refused() -> None:
    expected = "memory has 2 values, but there are 4 ranks."
    assert run("compare", "--no-search", "--memory", "4,4").error.startswith(expected)


@pytest.mark.parametrize("command", ["search", "compare"])
def test_memory_in_which_nothing_fits_names_the_smallest_that_does(command: str) -> None:
    assert "The smallest memory that fits is 1 on each rank" in run(command, "--memory", 0.5).error


def test_comparison_of_different_numbers_of_ranks_is_refused() -> None:
    error = run("compare", "good.csv", "other.csv").error
    assert error.startswith("other.csv has 2 ranks and 8 microbatches, but others have 4 and 8.")


def test_file_without_a_backward_is_left_out_of_a_comparison() -> None:
    lines = run("compare", "inference.csv", "--no-search").lines
    assert ["inference.csv", "has", "no", "backward"] in [line.split() for line in lines]


def test_times_without_unit_are_refused_beside_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=2)
    Recording((RecordedStep(0, simulate(schedule).timeline),)).save(path)
    error = run("show", path, "--costs", "1,1,1").error
    assert error.startswith(f"--costs is 1,1,1, but {path} was measured in seconds")
