"""Finds the processes that a command started, by a mark in their environment. Linux only."""

import ctypes
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def marked() -> Iterator[tuple[str, dict[str, str]]]:
    """A mark, and the environment that leaves it; whoever still has it in the end is killed."""
    name, value = "PENSTOCK_TEST_MARK", str(uuid.uuid4())
    try:
        yield f"{name}={value}", {name: value}
    finally:
        for pid in processes_with(f"{name}={value}"):
            os.kill(pid, signal.SIGKILL)


def processes_with(mark: str) -> dict[int, bytes]:
    """The environments of processes that have a mark there."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:  # It has ended, or is not ours.
            continue
        if mark.encode() in environment:
            found[int(path.parent.name)] = environment
    return found


def rank_processes(mark: str) -> list[int]:
    """The processes that a launcher of ours has started as ranks, in their order, then spares."""
    return sorted(
        pid
        for pid in processes_with(mark)
        if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def is_sentinel(pid: int) -> bool:
    """Whether a process is the one that the watch starts beside a rank."""
    return b"penstock.watch.sentinel" in Path("/proc", str(pid), "cmdline").read_bytes()


def none_is_left(mark: str, limit_s: float) -> bool:
    """Whether all processes with a mark end in time: sentinels see their rank end, and then end."""
    until_s = time.monotonic() + limit_s
    while processes_with(mark):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def end_with_the_tests() -> None:
    """For `preexec_fn`: the kernel kills the process if the tests are killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG.
