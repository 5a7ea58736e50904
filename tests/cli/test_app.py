"""The command as a whole: its entry points, its help, errors, pipes and what it loads."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command_line import PROGRAM, run, run_process

from limits import PROCESS_S
from penstock.cli.screen import print_json

SCHEDULES = ("show", "simulate", "compare", "search", "verify", "convert")
COMMANDS = (*SCHEDULES, "plan", "list", "train", "export", "demo", "studio")


@pytest.mark.parametrize("program", [[PROGRAM], [sys.executable, "-m", "penstock"]])
def test_program_and_module_are_the_same_command(program: list[object]) -> None:
    ran = run_process("--version", program=program)
    assert [f"penstock {metadata.version('penstock')}"] == ran.lines


def test_without_arguments_the_help_is_shown() -> None:
    assert run("--help") == run()
    assert {*COMMANDS} <= {line.split()[0] for line in run().lines if line.startswith("  ")}


def test_help_of_a_command_has_examples_on_lines_of_their_own() -> None:
    for command in COMMANDS:
        lines = run(command, "--help").lines
        examples = [line for line in lines if line.startswith(f"  penstock {command}")]
        assert 2 <= len(examples) <= 5, command


@pytest.mark.parametrize("command", SCHEDULES)
def test_examples_of_the_help_are_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files()
    for line in run(command, "--help").lines:
        example = line.strip()
        if example.startswith(f"penstock {command}") and "|" not in example:
            files = " ".join(map(str, sorted(Path("schedules").glob("*.csv"))))
            words = example.replace("schedules/*.csv", files).split()[1:]
            words += ["--effort", "0.01"] if command == "search" else []
            assert (0, "") == run(*words)[::2], example


def make_files() -> None:
    """What the examples read."""
    from penstock import CostTable, schedules, simulate
    from penstock.timeline import RecordedStep, Recording

    schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    costs = CostTable.uniform(4, delay=0.1)
    Path("schedules").mkdir()
    for path in ("best.csv", "zb_v.csv", "schedules/a.csv", "schedules/b.csv"):
        Path(path).write_text(schedule.to_csv())
    costs.save("costs.json")
    Recording((RecordedStep(0, simulate(schedule, costs).timeline),)).save("run.json")


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["shw"], 2, "No such command 'shw'."),
        (["show"], 2, "Missing argument 'NAME'."),
        (["show", "1F1B", "--colour"], 2, "No such option"),
        (["show", "1F1B", "-p", "0"], 2, "'--ranks' / '-p'"),
        (["simulate", "1F1B", "-m", "many"], 2, "'--microbatches' / '-m'"),
        (["compare", "--clock", "sun"], 2, "'--clock'"),
        (["show", "ZBW"], 1, "There is no schedule named 'ZBW'. Did you mean ZB-V?"),
        (["show", "DualPipeV", "-m", "3"], 1, "DualPipeV needs at least 8"),
        (["show", "1F1B", "-v", "2"], 1, "1F1B needs 1."),
    ],
)
def test_wrong_usage_is_told_in_one_line(args: list[str], code: int, expected: str) -> None:
    ran = run(*args)
    assert (code, "") == (ran.code, ran.out)
    assert expected in ran.error


def test_error_is_one_line_in_a_process_too_however_narrow_the_screen() -> None:
    env = {**os.environ, "COLUMNS": "20"}
    command = [PROGRAM, "show", "ZBW"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROCESS_S, env=env, check=False
    )
    assert (1, 1) == (done.returncode, done.stderr.count("\n"))


def test_debug_shows_where_an_error_comes_from() -> None:
    ran = run_process("show", "ZBW", "--debug")
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("penstock.errors.ScheduleError: There is no")


@pytest.mark.parametrize("command", ["show 1F1B -p 8 -m 99", "convert GPipe -p 99 -m 999"])
def test_reader_that_has_had_enough_is_no_error(command: str) -> None:
    script = f"{PROGRAM} {command} | head -1"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (1, "") == (done.stdout.count("\n"), done.stderr)


@pytest.mark.parametrize(
    "args",
    [
        ["show", "ZB-V", "1F1B"],
        ["search", "-m", "2"],
        ["convert", "ZB-V", "--comms", "--gathers", "once"],
        ["list", "--json"],
        ["--help"],
        ["train", "--help"],
        ["plan", "--help"],
    ],
)
def test_command_loads_nothing_heavy(args: list[str]) -> None:
    # The startup time follows from this, and unlike a time it is the same on every machine.
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        "try:\n"
        f"    main({args})\n"
        "except SystemExit as exc:\n"
        "    assert not exc.code\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'ortools'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    ran = run_process(program=[sys.executable, "-c", code])
    assert (0, "[]\n") == (ran.code, ran.err)


@pytest.mark.parametrize("is_plain", [False, True])
def test_terminal_gets_colours_unless_no_color_is_set(is_plain: bool) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a terminal of its own")
    import pty

    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "CI")}
    env |= {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if is_plain else {})
    # Its header is bold, and NO_COLOR means that too.
    command = [PROGRAM, "simulate", "1F1B", "-p", "2"]
    subprocess.run(command, stdout=theirs, timeout=PROCESS_S, env=env, check=True)
    assert is_plain == (b"\x1b" not in os.read(ours, 1_000_000))
    os.close(ours)
    os.close(theirs)


def test_files_and_pipes_get_no_colours() -> None:
    assert "\x1b" not in run_process("show", "1F1B").out


def test_screen_that_lacks_characters_gets_others() -> None:
    program = ["env", "PYTHONIOENCODING=ascii", PROGRAM]
    assert run_process("show", "1F1B", program=program).lines[0] == "1F1B"


def test_width_is_that_of_columns_or_100() -> None:
    program = ["env", "COLUMNS=60", PROGRAM]
    assert 60 >= max(map(len, run_process("show", "1F1B", program=program).lines))
    assert 90 < max(map(len, run("show", "1F1B").lines)) <= 100


def test_list_has_every_schedule_with_its_facts() -> None:
    from penstock import schedules

    lines = run("list").lines
    assert ["schedule", *schedules.names()] == [line.split()[0] for line in lines if line[0] != " "]
    [zb_v] = [facts for facts in json.loads(run("list", "--json").out) if facts["name"] == "ZB-V"]
    assert ("V", 2, False) == (
        zb_v["placement"],
        zb_v["stages_per_rank"],
        zb_v["takes_any_stages_per_rank"],
    )


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"gap": float("inf"), "times": (1.5, float("nan"))})
    assert {"gap": None, "times": [1.5, None]} == json.loads(capsys.readouterr().out)


def test_interrupt_is_told_in_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def be_interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.verify_command.read_file", be_interrupted)
    assert (130, "", "interrupted\n") == run("verify", "any.csv")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["simulate", "1F1B", "-m", "1000000000"], "--ranks is 4 and --microbatches 1000000000."),
        (["show", "1F1B", "-p", "100000"], "--ranks is 100000 and --microbatches 8."),
        (["train", "-p", "100000000"], "--ranks is 100000000 and --microbatches 8."),
        (["show", "1F1B", "--costs", "1e308,1,1"], "--costs is 1e308,1,1. Expected times that are"),
        (["show", "1F1B", "--delay", "1e308"], "Invalid value for '--delay'"),
        (["show", "1F1B", "--width", "1000000000"], "Invalid value for '--width'"),
    ],
)
def test_numbers_that_nobody_could_wait_for_are_refused(args: list[str], expected: str) -> None:
    assert run(*args).error.startswith(expected)


@pytest.mark.parametrize("failure", [MemoryError(), OverflowError("too large")])
def test_numbers_that_are_too_large_all_the_same_are_told_in_one_line(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise failure

    monkeypatch.setattr("penstock.cli.verify_command.read_file", fail)
    assert run("verify", "any.csv").error.startswith("the numbers are too large (")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_stream_is_no_error(closed: str) -> None:
    script = f"{PROGRAM} list {closed}; ({PROGRAM} show nosuch {closed}); echo $?"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "1" == done.stdout.splitlines()[-1]
