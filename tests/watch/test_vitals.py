"""What Linux shows of a process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from limits import HANG_S
from penstock.watch import vitals
from penstock.watch.vitals import ending_of, is_stopped, thread_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", str(HANG_S)]) as process:
        yield process
        process.kill()


def _until(holds: object) -> None:
    until_s = time.monotonic() + HANG_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_stopped_process_is_told_from_a_sleeping_one(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    _until(lambda: is_stopped(sleeper.pid))
    sleeper.send_signal(signal.SIGCONT)
    _until(lambda: not is_stopped(sleeper.pid))


def test_the_signal_that_killed_a_process_is_named(sleeper: subprocess.Popen[bytes]) -> None:
    assert not ending_of(sleeper.pid, None).is_known  # It lives.
    sleeper.send_signal(signal.SIGKILL)
    _until(lambda: ending_of(sleeper.pid, None).is_known)
    assert ("was killed by SIGKILL", True, False) == ending_of(sleeper.pid, None)
    sleeper.wait()
    assert ("ended without saying so", False, False) == ending_of(sleeper.pid, None)


def test_a_process_that_its_parent_has_forgotten_is_known_on_new_kernels() -> None:
    with subprocess.Popen(["sh", "-c", "exit 3"]) as process:
        pidfd = os.pidfd_open(process.pid)
        process.wait()
        ending = ending_of(process.pid, pidfd)
        os.close(pidfd)
    assert ending.how in ("ended with exit status 3", "ended without saying so")
    assert not ending.is_good
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15):
        assert ending.is_known


@pytest.mark.parametrize(("status", "is_good"), [(0, True), (7, False)])
def test_an_exit_status_is_good_if_it_is_zero(status: int, is_good: bool) -> None:
    with subprocess.Popen(["sh", "-c", f"exit {status}"]) as process:
        _until(lambda: ending_of(process.pid, None).is_known)
        assert (f"ended with exit status {status}", True, is_good) == ending_of(process.pid, None)


def test_a_signal_without_a_name_has_its_number() -> None:
    assert "signal 50" == vitals._name(50)


def test_a_thread_that_computes_gains_time() -> None:
    thread = threading.get_native_id()
    before = thread_time(thread)
    assert before is not None
    _until(lambda: thread_time(thread)[1] > before[1])  # type: ignore[index]
    assert thread_time(2**22 + 1) is None
