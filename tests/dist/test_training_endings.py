"""A training that is interrupted, ended or killed ends on all ranks, and leaves no process behind.

`penstock demo` has the same launcher. tests/cli/test_train_command.py has what `penstock train`
says besides.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from limits import HANG_S, PROCESS_S
from process_marks import is_sentinel, marked, none_is_left, processes_with, rank_processes

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

SIZES = ["--layers=4", "--width=16", "--heads=2", "--context=8", "--batch=8"]
ENDLESS = [sys.executable, "-m", "penstock", "train", *SIZES, "--steps=1000000", "--json"]


@contextmanager
def endless_training() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A training in its midst, and a mark in the environment of all its processes."""
    with marked() as (mark, environment):
        process = subprocess.Popen(
            ENDLESS,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # What a shell starts in the background ignores interrupts, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        assert 1 == json.loads(process.stdout.readline())["step"]
        yield process, mark
    process.communicate(timeout=PROCESS_S)


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_end_of_the_command_leaves_no_process(signum: int, code: int, said: str) -> None:
    with endless_training() as (process, mark):
        started = processes_with(mark)
        assert 3 == sum(not is_sentinel(pid) for pid in started)
        assert 2 == sum(is_sentinel(pid) for pid in started)
        process.send_signal(signum)
        # The pipe of the output ends only when the last rank has.
        _, errors = process.communicate(timeout=PROCESS_S)
        assert none_is_left(mark, HANG_S)
    assert (code, said) == (process.returncode, errors)


def test_rank_that_is_killed_ends_all_with_its_name() -> None:
    with endless_training() as (process, mark):
        _, pid = rank_processes(mark)
        os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=PROCESS_S)
        assert none_is_left(mark, HANG_S)
    assert 1 == process.returncode
    *logged, line = errors.splitlines()
    for each in logged:  # If the other rank learned of it before it was ended too.
        assert each.startswith("rank 0: rank 1 (host ")
    assert line.startswith(f"error: rank 1 (process {pid}) was ended by SIGKILL, so all others")
