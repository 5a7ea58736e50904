"""Hosts for tests: network namespaces of this machine, joined by a switch. Linux, as root.

    host 0: 10.77.0.1 ──┐
    host 1: 10.77.0.2 ──┼── a bridge, in a namespace of its own
    host 2: 10.77.0.3 ──┘

Nothing outside of these namespaces changes, and no address in them leads anywhere else.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_NAMES = Path("/run/netns")
_PREFIX = "penstock-"
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS.
_LIMIT_S = 30.0
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing() -> str:
    """Return why there can be no hosts here, or an empty text."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.getuid() != 0:
        return "needs root, for network namespaces"
    if not all(shutil.which(program, path=_PATH) for program in ("ip", "tc")):
        return "needs iproute2: see scripts/hosts"
    probe = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, timeout=_LIMIT_S
    )
    return "" if probe.returncode == 0 else f"network namespaces: {probe.stderr.strip()}"


class Hosts:
    """Some hosts; use it as a context, at whose end nothing of them is left."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._names = [f"{_PREFIX}{os.getpid()}-{host}" for host in range(count)]
        self._switch = f"{_PREFIX}{os.getpid()}-switch"

    def __enter__(self) -> "Hosts":
        _remove_abandoned()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def name(self, host: int) -> str:
        """The name of a host, as its processes see it."""
        return f"host-{host}"

    def enter(self, host: int) -> None:
        """Move this process, which has one thread, to a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(_NAMES / self._names[host]) as file:
            for done in (libc.setns(file.fileno(), _NEW_NETWORK), libc.unshare(_NEW_NAMES)):
                if done != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        socket.sethostname(self.name(host))

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; the kernel kills it if this process ends."""
        enter = _entering(lambda: self.enter(host))
        return subprocess.Popen(command, preexec_fn=enter, start_new_session=True, **options)

    def torchrun(self, host: int, *, num_hosts: int, per_host: int, how: str) -> list[str]:
        """The launcher of a host, with the names of a rendezvous as docs/machines.md has them."""
        first = self.address(0)
        options = {
            "static": f"--node-rank={host} --master-addr={first} --master-port=29600",
            "c10d": f"--rdzv-backend=c10d --rdzv-endpoint={first}:29601 --rdzv-id=test "
            f"--rdzv-conf=is_host={int(host == 0)} --local-addr={self.address(host)}",
        }
        options_of_all = f"--nnodes={num_hosts} --nproc-per-node={per_host}"
        run = [sys.executable, "-m", "torch.distributed.run"]
        return [*run, *options[how].split(), *options_of_all.split()]

    def environment(self) -> dict[str, str]:
        """The variables for programs of the hosts, whose names do not resolve."""
        return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}

    def cut(self, host: int) -> None:
        """Take the link of a host down; what it sends is lost."""
        _run("ip", "-n", self._switch, "link", "set", f"to{host}", "down")

    def mend(self, host: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"to{host}", "up")

    def slow(self, host: int, rate: str) -> None:
        """Limit what a host can send and receive, such as "1mbit"."""
        tbf = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "500ms")
        _run("tc", "-n", self._names[host], "qdisc", "replace", "dev", "eth0", *tbf)
        _run("tc", "-n", self._switch, "qdisc", "replace", "dev", f"to{host}", *tbf)

    def quicken(self, host: int) -> None:
        _run("tc", "-n", self._names[host], "qdisc", "del", "dev", "eth0", "root")
        _run("tc", "-n", self._switch, "qdisc", "del", "dev", f"to{host}", "root")

    def processes(self) -> list[int]:
        """The processes that run on the hosts."""
        return [pid for host in range(self.count) for pid in self.processes_of(host)]

    def processes_of(self, host: int) -> list[int]:
        return _processes_in(self._names[host])

    def crash(self, host: int) -> None:
        """Kill all processes of a host."""
        _end_processes(self._names[host])

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            ends = ("eth0", "type", "veth", "peer", "name", f"to{host}", "netns", self._switch)
            _run("ip", "-n", name, "link", "add", *ends)
            _run("ip", "-n", self._switch, "link", "set", f"to{host}", "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            _remove(name)


def _entering(enter: Callable[[], None]) -> Callable[[], None]:
    def prepare() -> None:
        enter()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG.

    return prepare


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, env={"PATH": _PATH}
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _processes_in(name: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", name).split()]


def _remove(name: str) -> None:
    """Remove a namespace and the processes in it; its devices go with it."""
    if not (_NAMES / name).exists():
        return
    _end_processes(name)
    _run("ip", "netns", "del", name)


def _end_processes(name: str) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while (pids := _processes_in(name)) and time.monotonic() < until_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _remove_abandoned() -> None:
    """Remove what was left by tests that were killed."""
    for path in _NAMES.glob(f"{_PREFIX}*-*"):
        owner = path.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(path.name)
