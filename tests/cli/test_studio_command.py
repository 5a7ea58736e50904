"""`penstock studio` as a process: where it listens, what it begins with, how it ends."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit

import pytest
from command_line import run

from limits import HANG_S
from penstock import CostTable, schedules, simulate
from penstock.studio.serving import has_screen
from penstock.studio.typed_inputs import read_inputs
from penstock.timeline import RecordedStep, Recording
from process_marks import processes_with
from studio_process import Studio, studio

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


def wait_for_processes(mark: str, count: int) -> None:
    end = time.monotonic() + HANG_S
    while count != len(processes_with(mark)):
        assert time.monotonic() < end, f"there are {len(processes_with(mark))}, not {count}"
        time.sleep(0.01)


def test_says_its_address_and_ends_well_at_ctrl_c() -> None:
    with studio("--port", 0) as running:
        assert running.address.startswith("http://127.0.0.1:")
        assert "Penstock" in running.get("")
        assert (0, "The studio has stopped.\n", "") == running.stop()
        with pytest.raises(URLError):
            running.get("")


@needs_proc
def test_ctrl_c_during_a_search_leaves_no_process() -> None:
    with studio("--port", 0) as running:
        asked = ask_for_a_long_search(running)
        code, _, err = running.stop()
        assert (0, "") == (code, err)
        wait_for_processes(running.mark, 0)
        asked.close()


def test_ctrl_c_does_not_wait_for_what_is_drawn() -> None:
    with studio("--port", 0) as running:
        # Half a minute's work.
        asked = ask(running, "/files/a.png?ranks=64&microbatches=128")
        running.get("picture?ranks=2")  # By then the other is under way.
        code, _, err = running.stop()
        assert (0, "") == (code, err)
        asked.close()


@needs_proc
def test_search_that_nobody_waits_for_is_stopped() -> None:
    with studio("--port", 0) as running:
        asked = ask_for_a_long_search(running)
        asked.close()
        wait_for_processes(running.mark, 1)
        assert '"ZB-V"' in running.get("table")
        assert (0, "") == running.stop()[::2]


@needs_proc
def test_search_ends_when_the_server_is_killed() -> None:
    with studio("--port", 0) as running, ask_for_a_long_search(running):
        running.process.kill()
        wait_for_processes(running.mark, 0)


def ask_for_a_long_search(running: Studio) -> socket.socket:
    """Returns when the process of the search is there."""
    asked = ask(running, "/search?ranks=32&microbatches=128&search=thorough")
    wait_for_processes(running.mark, 2)
    return asked


def ask(running: Studio, path: str) -> socket.socket:
    """Does not wait for an answer."""
    where = urlsplit(running.address)
    assert where.hostname is not None
    asked = socket.create_connection((where.hostname, where.port or 0), timeout=HANG_S)
    asked.sendall(f"GET {path} HTTP/1.1\r\nHost: {where.hostname}\r\n\r\n".encode())
    return asked


def test_file_beside_it_is_not_taken_for_a_module_of_pythons(tmp_path: Path) -> None:
    # A search is a process of its own, started where the studio was.
    (tmp_path / "fractions.py").write_text("raise ImportError('of the user')\n")
    with studio("--port", 0, folder=tmp_path) as running:
        assert '"name":"searched"' in running.get("search?ranks=2")


def test_page_is_opened_in_the_browser_where_there_is_a_screen(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {asked}.part && mv {asked}.part {asked}\n')
    browser.chmod(0o755)
    with studio("--port", 0, "-p", 2, DISPLAY=":0", BROWSER=f"{browser} %s") as running:
        end = time.monotonic() + HANG_S
        while not asked.exists():
            assert time.monotonic() < end, "nothing was opened"
            time.sleep(0.01)
        assert f"{running.address}\n" == asked.read_text()


def test_no_browser_is_opened_where_there_is_no_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not has_screen()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_screen()


def test_port_that_is_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"--port is {port}, which cannot be used: Address already in use. Give"
        assert run("studio", "--no-open", "--port", port).error.startswith(expected)


def test_without_a_port_another_is_taken_if_the_usual_one_is_in_use() -> None:
    with studio() as first, studio() as second:
        assert first.address != second.address
        assert first.get("page.js") == second.get("page.js")


def test_options_are_what_the_page_begins_with() -> None:
    shape, costs = ("-p", 8, "-m", 3), ("--costs", "1,1,0.8", "--delay", 0.1, "--memory", 8)
    sizes = ("--lengths", "512,1024,512", "--work", "1,0.5", "--recompute")
    with studio(*shape, *costs, *sizes, "--port", 0) as running:
        assert {
            "ranks": "8",
            "microbatches": "3",
            "lengths": "512,1024,512",
            "work": "1,0.5",
            "recompute": "yes",
            "backward_weight": "0.8",
            "delay": "0.1",
            "memory": "8",
        } == running.fields


def test_costs_of_a_file_are_typed_in_along_the_model(tmp_path: Path) -> None:
    costs = CostTable(
        forward=[1, 2, 3, 4],
        backward_input=[1] * 4,
        backward_weight=[0.5] * 4,
        backward=[1.25, 1.25, 1.5, 1.25],
        after_forward=[8, 4, 4, 4],
        after_dropping=[1, 1, 2, 1],
        recompute=[1, 2, 2, 2],
        delay=0.25,
    )
    costs.save(tmp_path / "costs.json")
    args = ("--costs", tmp_path / "costs.json", "-p", 2, "--memory", "1KiB")
    with studio(*args, "--port", 0) as running:
        inputs = read_inputs(running.fields)
    assert (1024.0, "bytes") == (inputs.question.memory, inputs.question.costs.memory_unit)
    schedule = schedules.get("ZB-V")(num_ranks=2, num_microbatches=8)
    assert costs == inputs.question.costs.table(schedule.placement)


def test_costs_that_the_page_has_no_fields_for_are_named(tmp_path: Path) -> None:
    costs = CostTable.uniform(2, during_weight=3, gather=1, time_scale=[1, 2])
    costs.save(tmp_path / "costs.json")
    with studio("--costs", tmp_path / "costs.json", "--port", 0) as running:
        assert running.process.stderr is not None
        line = running.process.stderr.readline()
    assert (
        "The studio does not count during_weight, gather, time_scale; penstock search does.\n"
        == line
    )


def test_recording_is_typed_in_with_its_shape_in_seconds(tmp_path: Path) -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=3)
    timeline = simulate(schedule, CostTable.uniform(2, forward=0.5)).timeline
    Recording((RecordedStep(0, timeline),)).save(tmp_path / "run.json")
    with studio("--costs", tmp_path / "run.json", "--port", 0) as running:
        fields = running.fields
    assert ("2", "3", "0.5", "seconds") == tuple(
        fields[name] for name in ("ranks", "microbatches", "forward", "units")
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["-p", "65"], "ranks is '65'. Expected a whole number from 1 to 64."),
        (["--memory", "1,2"], "memory has 2 numbers, but there are 4 ranks."),
        (["--memory", "0.2,lots"], "--memory is 'lots'."),
        (["--memory", "8GiB"], "--memory is '8GiB', but the bytes that a microbatch holds"),
        (["--costs", "1,2"], "--costs is '1,2', which is neither a file nor three numbers."),
        (["--port", "70000"], "'--port'"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(args: list[str], expected: str) -> None:
    assert expected in run("studio", "--no-open", *args).error


def test_other_commands_load_no_server() -> None:
    program = (
        "import sys\n"
        "import penstock.cli.app\n"
        "print([name for name in ('starlette', 'uvicorn', 'anyio') if name in sys.modules])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S
    )
    assert "[]\n" == ran.stdout
