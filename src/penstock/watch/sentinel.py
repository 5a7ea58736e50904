"""The sentinel: a small process beside each rank that tells others whether it lives.

It is a process of its own, so that it can see a rank that is stopped or has ended, and is not held
up by one that computes. It needs the standard library alone, and ends with its rank.

    rank ── socket, page ── sentinel ── TCP ── sentinel of another rank, the hub ── its rank
"""

import contextlib
import mmap
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from penstock.watch.finding import Finding
from penstock.watch.hub import BEAT_S, LAST_HEARD, SILENT_S, Hub
from penstock.watch.place import SIZE, read_place, read_stages
from penstock.watch.vitals import ending_of, is_stopped
from penstock.watch.wire import Message, Wire

_CONNECT_S = 10.0
_LAST_WORDS_S = 1.0


def main(pid: int, control: int, page: int) -> NoReturn:
    """Watch the process `pid` until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Its rank decides when it ends.
    os.chdir("/")
    memory = mmap.mmap(page, SIZE, prot=mmap.PROT_READ)
    _Sentinel(pid, Wire(socket.socket(fileno=control)), memory).run()


class _Member:
    """The end of a connection to the hub, at a sentinel that is not the hub."""

    def __init__(
        self, order: Message, selector: selectors.BaseSelector, tell: Callable[[Message], None]
    ) -> None:
        self._tell = tell
        self._selector = selector
        self._hub = Finding(order["hub_rank"], order["hub_host"], "", "", "")
        self._stages, self._place = "", "outside of a step"
        self._heard_s = time.monotonic()
        address = order["address"], order["port"]
        connection = socket.create_connection(address, timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = Wire(connection)
        self._is_over = self._is_in = False
        selector.register(connection, selectors.EVENT_READ, self._read)

    def send(self, message: Message) -> None:
        if not self._is_over:
            try:
                self._wire.send(message)
            except ConnectionError:
                self._lose("was killed together with its sentinel")

    def judge(self, now_s: float, late_s: float) -> None:
        """Give up the hub if it has been silent for too long."""
        self._heard_s += late_s
        if now_s - self._heard_s >= SILENT_S:
            self._lose(
                f"does not answer (for {SILENT_S:g} s: its host or this one, or the link between "
                "them, is down)"
            )

    def _read(self) -> None:
        if self._is_over:
            return
        try:
            for message in self._wire.receive():
                self._heard_s = time.monotonic()
                self._take(message)
        except (ConnectionError, KeyError, TypeError):
            self._lose("was killed together with its sentinel")

    def _take(self, message: Message) -> None:
        self._is_in = True
        if "findings" in message:
            for finding in message["findings"]:
                Finding.of(finding)
            self._tell({"findings": message["findings"]})
        elif "beat" in message:
            self._stages, self._place = message["beat"]["stages"], message["beat"]["place"]
        elif "over" in message:
            self._end()

    def _lose(self, how: str) -> None:
        """Name the rank of the hub, as it is the only one that is known to be gone."""
        if self._is_over:
            return
        self._end()
        if not self._is_in:
            self._tell({"off": "the hub did not let it in"})
            return
        hub, place = self._hub, LAST_HEARD + str(self._place)
        found = Finding(hub.rank, hub.host, str(self._stages), how, place)
        self._tell({"findings": [found.as_message()]})

    def _end(self) -> None:
        self._is_over = True
        self._selector.unregister(self._wire.socket)
        self._wire.close()


class _Sentinel:
    """The state of a sentinel: its rank, and its part in the watch once it has one."""

    def __init__(self, pid: int, control: Wire, memory: mmap.mmap) -> None:
        self._pid = pid
        self._control = control
        self._memory = memory
        self._selector = selectors.DefaultSelector()
        self._selector.register(control.socket, selectors.EVENT_READ, self._obey)
        self._rank = -1
        self._hub: Hub | None = None
        self._member: _Member | None = None
        self._pidfd: int | None = None
        with contextlib.suppress(OSError):  # Kernels before 5.3 lack it: the parent then shows it.
            self._pidfd = os.pidfd_open(pid)
            self._selector.register(self._pidfd, selectors.EVENT_READ, self._end)

    def run(self) -> NoReturn:
        now_s = ticked_s = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(ticked_s + BEAT_S - now_s, 0)):
                key.data()
            now_s = time.monotonic()
            if now_s < ticked_s + BEAT_S:
                continue
            if os.getppid() != self._pid:
                self._end()
            late_s = max(now_s - ticked_s - 2 * BEAT_S, 0)
            ticked_s = now_s
            self._report("stopped" if is_stopped(self._pid) else "running")
            part = self._hub or self._member
            if part is not None:
                part.judge(now_s, late_s)

    def _report(self, state: str, how: str = "") -> None:
        """Say how the rank is, and to all others that this sentinel lives."""
        report = {
            "state": state,
            "how": how,
            "place": read_place(self._memory),
            "stages": read_stages(self._memory),
        }
        if self._hub is not None:
            self._hub.report(self._rank, report)
            self._hub.beat(report)
        elif self._member is not None:
            self._member.send(report)

    def _obey(self) -> None:
        """Do what the rank asks for."""
        try:
            orders = self._control.receive()
        except ConnectionError:  # It has ended, or has closed its end.
            self._end()
        for order in orders:
            if order["do"] == "leave":
                self._leave()
            self._rank = order["rank"]
            try:
                if order["do"] == "listen":
                    self._listen(order)
                else:
                    self._join(order)
            except OSError as exc:
                self._tell({"off": str(exc)})

    def _listen(self, order: Message) -> None:
        hub = Hub(order["address"], order["secret"], self._selector, self._tell)
        hub.judge(time.monotonic(), 0)
        hub.add_own(self._rank, order["host"])
        self._hub = hub
        self._tell({"port": hub.port})

    def _join(self, order: Message) -> None:
        self._member = _Member(order, self._selector, self._tell)
        hello = {"secret": order["secret"], "rank": self._rank, "host": order["host"]}
        self._member.send(
            hello
            | {
                "state": "running",
                "place": read_place(self._memory),
                "stages": read_stages(self._memory),
            }
        )

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # The rank may just be ending.
            self._control.send(message)

    def _leave(self) -> NoReturn:
        """End; the others need not wait for a word any longer."""
        if self._hub is not None:
            self._hub.end()
        else:
            self._report("left")
        os._exit(0)

    def _end(self) -> NoReturn:
        """Tell the others how the rank ended, and end too."""
        until_s = time.monotonic() + _LAST_WORDS_S
        ending = ending_of(self._pid, self._pidfd)
        # It may have closed its end, and not be gone yet.
        while not ending.is_known and os.getppid() == self._pid and time.monotonic() < until_s:
            time.sleep(0.01)
            ending = ending_of(self._pid, self._pidfd)
        if not ending.is_good:
            self._report("ended", ending.how)
        self._leave()
