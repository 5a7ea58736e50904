"""The state of a process, as Linux shows it in /proc."""

import os
import signal
import struct
from typing import NamedTuple

from penstock.watch.finding import ENDED

_STATE, _EXIT_CODE = 0, 49  # Fields of /proc/PID/stat after the name: see proc(5), less 3.
# The ioctl PIDFD_GET_INFO, and the bit that asks it for the exit code: see linux/pidfd.h.
_GET_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3
_INFO = struct.Struct("=QQ11Ii")
_STOPPED = "T"  # By a signal; "t" is for a process that a debugger holds.


class Ending(NamedTuple):
    """How a process ended: in words, and whether it ended well."""

    how: str
    is_known: bool
    is_good: bool


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process."""
    fields = _fields(f"/proc/{pid}/stat")
    return bool(fields) and fields[_STATE] == _STOPPED


def ending_of(pid: int, pidfd: int | None) -> Ending:
    """Return how a process ended; its parent may already have forgotten it."""
    status = _status_in_proc(pid)
    if status is None and pidfd is not None:
        status = _status_in_pidfd(pidfd)
    if status is None:
        return Ending("ended without saying so", is_known=False, is_good=False)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Ending(f"was killed by {_name(-code)}", is_known=True, is_good=False)
    return Ending(f"{ENDED} {code}", is_known=True, is_good=code == 0)


def _status_in_proc(pid: int) -> int | None:
    """Return the status of a process that has ended, and that its parent has not asked for yet."""
    fields = _fields(f"/proc/{pid}/stat")
    return int(fields[_EXIT_CODE]) if fields and fields[_STATE] in "ZX" else None


def _status_in_pidfd(pidfd: int) -> int | None:
    """Return the status of a process that its parent has asked for; needs Linux 6.15."""
    import fcntl  # Windows lacks it.

    asked = _INFO.pack(_INFO_EXIT, *[0] * 13)
    try:
        mask, *_, status = _INFO.unpack(fcntl.ioctl(pidfd, _GET_INFO, asked))
    except OSError:
        return None
    return int(status) if mask & _INFO_EXIT else None


def thread_time(thread: int) -> tuple[str, float] | None:
    """Return the state of a thread of this process, and the seconds that it has computed."""
    fields = _fields(f"/proc/self/task/{thread}/stat")
    if not fields:
        return None
    ticks = int(fields[11]) + int(fields[12])  # In user and in system mode.
    return fields[_STATE], ticks / os.sysconf("SC_CLK_TCK")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fields(path: str) -> list[str]:
    """Return the fields after the name of the program, which may hold spaces and brackets."""
    try:
        with open(path) as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
