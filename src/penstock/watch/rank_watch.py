"""A rank's side of the watch: it starts its sentinel, and learns from it which ranks are dead."""

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from penstock.watch.blocked_rank import Blockage
from penstock.watch.finding import Finding
from penstock.watch.place import SIZE, Place
from penstock.watch.wire import Message, Wire

LOGGER = logging.getLogger("penstock")

_START_S = 30.0
_LOOK_S = 1.0
# The sentinel loads this package without its __init__, and so in a few hundredths of a second.
_PROGRAM = """
import sys, types
package = types.ModuleType("penstock")
package.__path__ = [sys.argv[1]]
sys.modules["penstock"] = package
from penstock.watch.sentinel import main
main(*map(int, sys.argv[2:]))
"""


class Interruptible(Protocol):
    """Something with waits that another thread can end."""

    def interrupt(self) -> None:
        """Let every wait fail, from now on."""


class RankWatch:
    """This rank's part in the watch over the ranks of one world.

    `place` is where the rank writes what it does. Make it with `start`.
    """

    def __init__(self, rank: int, sentinel: "_SentinelProcess", place: Place) -> None:
        self.rank = rank
        self.place = place
        self._sentinel = sentinel
        self._pid = os.getpid()
        self._findings: list[Finding] = []
        self._waiting: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._has_left = False
        self.is_needed: Callable[[], bool] = lambda: True
        """Returns whether this process is still a rank of the world that is watched."""
        self._listener: threading.Thread | None = None

    @classmethod
    def start(cls, rank: int) -> "RankWatch":
        """Start the sentinel of this process; raise an OSError if that is not possible."""
        page = os.memfd_create("penstock-place")
        try:
            os.ftruncate(page, SIZE)
            place = Place(mmap.mmap(page, SIZE))
            return cls(rank, _SentinelProcess(page), place)
        finally:
            os.close(page)

    def listen(self, address: str, secret: str) -> int:
        """Let the sentinel be the hub, at this address; return its port."""
        self._sentinel.order({"do": "listen", "address": address, **self._self(secret)})
        answer = self._sentinel.answer()
        if "port" not in answer:
            raise OSError(f"its sentinel cannot listen on {address}: {answer.get('off')}")
        self._begin()
        return int(answer["port"])

    def join(self, hub: Message) -> None:
        """Let the sentinel report to the hub; `hub` has its rank, host, address and secret."""
        self._sentinel.order({"do": "join", **hub, **self._self(hub["secret"])})
        self._begin()

    def interrupting(self, waiting: Interruptible) -> None:
        """Interrupt the waits of an object if a rank is found dead."""
        self._waiting.add(waiting)

    def findings(self) -> list[Finding]:
        """Return the ranks that were found dead."""
        with self._lock:
            return list(self._findings)

    def await_findings(self, timeout_s: float) -> None:
        """Wait until a rank is found dead, or the time is over, unless this one has left."""
        until_s = time.monotonic() + timeout_s
        while not (self._has_left or self.findings()) and time.monotonic() < until_s:
            time.sleep(0.02)

    def is_of_this_process(self) -> bool:
        """Return False in a fork, which has no sentinel."""
        return os.getpid() == self._pid

    def leave(self) -> None:
        """Take part no longer, and end the sentinel: this rank ends well."""
        if not self._has_left and self.is_of_this_process():
            self._has_left = True
            self._sentinel.end()
            # A thread that is inside torch when the interpreter ends would abort the process.
            if self._listener not in (None, threading.current_thread()):
                self._listener.join(_LOOK_S)

    def _self(self, secret: str) -> Message:
        return {"rank": self.rank, "host": socket.gethostname(), "secret": secret}

    def _begin(self) -> None:
        self._listener = threading.Thread(target=self._listen, name="penstock watch", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Wait for findings; once there are some, see to it that this rank does not hang."""
        blockage: Blockage | None = None
        while True:
            try:
                messages = self._sentinel.receive(None if blockage is None else _LOOK_S)
            except (ConnectionError, OSError):
                if not self._has_left:
                    LOGGER.warning(
                        "rank %d is not watched any longer: its sentinel has ended.", self.rank
                    )
                return
            for message in messages:
                if "off" in message:
                    LOGGER.warning("rank %d is not watched: %s.", self.rank, message["off"])
                elif self._take([Finding.of(found) for found in message.get("findings", ())]):
                    blockage = blockage or Blockage()
            if blockage is not None and blockage.has_lasted():
                if self.is_needed():
                    self._end_process(blockage)
                self.leave()
                return

    def _take(self, findings: list[Finding]) -> bool:
        with self._lock:
            self._findings += findings
        for finding in findings:
            LOGGER.error("rank %d: %s.", self.rank, self.describe(finding))
        for waiting in list(self._waiting) if findings else ():
            waiting.interrupt()
        return bool(findings)

    def describe(self, finding: Finding) -> str:
        """Return a finding in words."""
        if finding.rank == self.rank:
            return f"this rank was given up by the others: {finding}"
        return str(finding)

    def _end_process(self, blockage: Blockage) -> NoReturn:
        """End a process that waits where it cannot be interrupted, such as in a collective."""
        found = "; ".join(map(self.describe, self.findings()))
        sys.stderr.write(
            f"rank {self.rank} ends, because {found}. It would wait for ever in {blockage.where}.\n"
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.leave()
        os._exit(1)


class _SentinelProcess:
    """The process of the sentinel, and the socket that leads to it."""

    def __init__(self, page: int) -> None:
        if not sys.executable:
            raise OSError("the Python interpreter has no path, so no sentinel can be started")
        ours, theirs = socket.socketpair()
        with theirs:
            package = str(Path(__file__).parents[1])
            numbers = map(str, (os.getpid(), theirs.fileno(), page))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, package, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), page),
                start_new_session=True,
            )
        self._wire = Wire(ours)

    def order(self, message: Message) -> None:
        self._wire.send(message)

    def answer(self) -> Message:
        """Wait for the first message."""
        messages = self.receive(_START_S)
        return messages[0] if messages else {"off": f"it did not start in {_START_S:g} s"}

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Wait for messages; there are none if the time is over."""
        self._wire.socket.settimeout(timeout_s)
        return self._wire.receive()

    def end(self) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            self._wire.send({"do": "leave"})
        try:
            self._process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._wire.socket.shutdown(socket.SHUT_RDWR)
