"""The hub: the sentinel that all others report to, and that decides which ranks are dead.

It listens at one address, and takes part only with those who know its secret. All times are those
of its own clock, and time in which it did not run itself counts for nobody.
"""

import hmac
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

from penstock.watch.finding import Finding
from penstock.watch.wire import Message, Wire

SILENT_S = 6.0
"""The time without any word after which a host is taken for dead."""
STOPPED_S = 5.0
"""The time after which a stopped process is given up."""
BEAT_S = 0.5
"""The time between two words of a sentinel."""
LAST_HEARD = "last heard of "
"""Begins the place of a rank that may have gone on."""
_HELLO_S = 5.0
_MOST_GUESTS = 64


@dataclass
class _Member:
    rank: int
    host: str
    wire: Wire | None
    """None for the rank of this sentinel."""
    heard_s: float
    stages: str = ""
    place: str = ""
    stopped_s: float | None = None
    """When it was first seen stopped, while others were not."""

    def found(self, how: str) -> Finding:
        return Finding(self.rank, self.host, self.stages, how, self.place)


class Hub:
    """The ranks that take part. `tell` passes findings to the rank of this sentinel."""

    def __init__(
        self,
        address: str,
        secret: str,
        selector: selectors.BaseSelector,
        tell: Callable[[Message], None],
    ) -> None:
        self._secret = secret
        self._selector = selector
        self._tell = tell
        self._members: dict[int, _Member] = {}
        self._guests: dict[Wire, float] = {}
        self._wires: dict[Wire, int] = {}
        """The ranks behind all connections, those of ranks that were given up included."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen()
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._now_s = 0.0
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def add_own(self, rank: int, host: str) -> None:
        """Add the rank of this sentinel."""
        self._members[rank] = _Member(rank, host, None, self._now_s)

    def report(self, rank: int, report: Message) -> None:
        """Note what a sentinel says of its rank."""
        member = self._members.get(rank)
        if member is None:  # It was given up, or has left.
            return
        member.heard_s = self._now_s
        member.place, member.stages = str(report["place"])[:400], str(report["stages"])[:100]
        match report["state"]:
            case "ended":
                self._give_up([member], str(report["how"])[:100])
            case "left":
                del self._members[rank]
            case "stopped" if member.stopped_s is None:
                member.stopped_s = self._now_s
            case "running":
                member.stopped_s = None

    def judge(self, now_s: float, late_s: float) -> None:
        """Give up ranks that are silent or stopped; `late_s` is how long this did not run."""
        self._now_s = now_s
        members = list(self._members.values())
        for member in members:
            member.heard_s += late_s
        if all(member.stopped_s is not None for member in members):
            for member in members:  # Nobody waits for anybody: the user has stopped them all.
                member.stopped_s = now_s
        stopped = [
            m for m in members if m.stopped_s is not None and now_s - m.stopped_s >= STOPPED_S
        ]
        self._give_up(stopped, f"has been stopped by a signal for {STOPPED_S:g} s")
        silent = [m for m in members if m.wire is not None and now_s - m.heard_s >= SILENT_S]
        if silent:  # The others of a dead host are known to be dead too.
            silent = [m for m in members if m.wire is not None and now_s - m.heard_s > SILENT_S / 2]
            for member in silent:
                member.place = LAST_HEARD + member.place
            how = f"does not answer (for {SILENT_S:g} s: its host, or the link to it, is down)"
            self._give_up(silent, how)
        for guest, since_s in list(self._guests.items()):
            if now_s - since_s > _HELLO_S:
                self._drop(guest)

    def beat(self, own: Message) -> None:
        """Send a word to all; it says where the rank of this sentinel is."""
        self._send_all({"beat": own})

    def end(self) -> None:
        """Tell all that the watch is over, as the rank of this sentinel has left."""
        self._send_all({"over": True})

    def _give_up(self, members: list[_Member], how: str) -> None:
        members = [member for member in members if member.rank in self._members]
        for member in members:
            del self._members[member.rank]
        if members:
            findings = [member.found(how).as_message() for member in members]
            self._send_all({"findings": findings})
            self._tell({"findings": findings})

    def _send_all(self, message: Message) -> None:
        for wire in list(self._wires):
            try:
                wire.send(message)
            except ConnectionError:
                self._drop(wire)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # It was gone again.
            return
        if len(self._guests) >= _MOST_GUESTS:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(connection)
        self._guests[wire] = self._now_s
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(wire))

    def _read(self, wire: Wire) -> None:
        try:
            for message in wire.receive():
                if wire in self._guests:
                    self._welcome(wire, message)
                else:
                    self.report(self._wires[wire], message)
        except (ConnectionError, KeyError, TypeError, ValueError):
            self._drop(wire)

    def _welcome(self, wire: Wire, hello: Message) -> None:
        """Take part with a sentinel that knows the secret; otherwise raise a ConnectionError."""
        if not hmac.compare_digest(str(hello.get("secret")).encode(), self._secret.encode()):
            raise ConnectionError("the secret is wrong")
        rank, host = int(hello["rank"]), str(hello["host"])[:100]
        if rank in self._members:
            raise ConnectionError("that rank takes part already")
        del self._guests[wire]
        self._wires[wire] = rank
        self._members[rank] = _Member(rank, host, wire, self._now_s)
        self.report(rank, hello)
        wire.send({"welcome": True})

    def _drop(self, wire: Wire) -> None:
        """End a connection; a rank that had not left is given up."""
        if wire not in self._guests and wire not in self._wires:  # It was dropped already.
            return
        self._guests.pop(wire, None)
        rank = self._wires.pop(wire, None)
        self._selector.unregister(wire.socket)
        wire.close()
        if rank is not None and rank in self._members:
            self._give_up([self._members[rank]], "was killed together with its sentinel")
