"""Whom the hub gives up, and whom it lets in; the clock is the test's."""

import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.watch.hub import SILENT_S, STOPPED_S, Hub
from penstock.watch.wire import Message, Wire

SECRET = "a secret"
RUNNING = {"state": "running", "how": "", "place": "in step 1", "stages": "stage 1"}


class _Desk:
    """A hub on this machine, and the sentinels that the test plays."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.told: list[Message] = []
        self.hub = Hub("127.0.0.1", SECRET, self.selector, self.told.append)
        self.now_s = 100.0
        self.hub.judge(self.now_s, 0)
        self.hub.add_own(0, "alpha")
        self.others: list[socket.socket] = []

    def connect(self) -> Wire:
        connection = socket.create_connection(("127.0.0.1", self.hub.port))
        self.others.append(connection)
        return Wire(connection)

    def join(self, rank: int, host: str = "beta", **changed: Any) -> Wire:
        wire = self.connect()
        wire.send({"secret": SECRET, "rank": rank, "host": host} | RUNNING | changed)
        self.run()
        return wire

    def say(self, wire: Wire, **changed: Any) -> None:
        wire.send(RUNNING | changed)
        self.run()

    def run(self) -> None:
        while ready := self.selector.select(0.05):
            for key, _ in ready:
                key.data()

    def pass_time(self, seconds: float, late_s: float = 0.0) -> None:
        self.now_s += seconds
        self.hub.judge(self.now_s, late_s)

    def found(self) -> list[tuple[int, str]]:
        return [(one["rank"], one["how"]) for each in self.told for one in each["findings"]]

    def heard_by(self, wire: Wire) -> list[Message]:
        wire.socket.settimeout(0.05)
        messages: list[Message] = []
        while more := wire.receive():
            messages += more
        return messages


@pytest.fixture
def desk() -> Iterator[_Desk]:
    desk = _Desk()
    yield desk
    for key in list(desk.selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    desk.selector.close()
    for connection in desk.others:
        connection.close()


def test_a_silent_host_is_given_up_with_all_its_ranks_at_once(desk: _Desk) -> None:
    first = desk.join(1)
    desk.join(2, "gamma")
    desk.pass_time(1)
    desk.join(3, "gamma")
    desk.pass_time(SILENT_S - 1.1)
    assert [] == desk.told
    desk.say(first)
    desk.pass_time(0.1)
    how = "does not answer (for 6 s: its host, or the link to it, is down)"
    assert [(2, how), (3, how)] == desk.found()
    (finding, _) = desk.told[0]["findings"]
    assert ("gamma", "stage 1", "last heard of in step 1") == (
        finding["host"],
        finding["stages"],
        finding["place"],
    )
    assert [{"welcome": True}, {"findings": desk.told[0]["findings"]}] == desk.heard_by(first)
    desk.pass_time(SILENT_S - 1)
    assert 1 == len(desk.told)  # Nobody is given up twice.


def test_time_in_which_the_hub_did_not_run_counts_for_nobody(desk: _Desk) -> None:
    desk.join(1)
    desk.pass_time(60, late_s=59)
    assert [] == desk.told


def test_a_rank_that_is_stopped_is_given_up_while_others_run(desk: _Desk) -> None:
    wire = desk.join(1)
    desk.say(wire, state="stopped")
    desk.pass_time(STOPPED_S - 0.1)
    desk.say(wire, state="stopped")
    assert [] == desk.told
    desk.pass_time(0.1)
    assert [(1, "has been stopped by a signal for 5 s")] == desk.found()
    assert [{"welcome": True}, desk.told[0]] == desk.heard_by(wire)  # It learns of it too.


def test_a_rank_that_goes_on_in_time_is_not_given_up(desk: _Desk) -> None:
    wire = desk.join(1)
    desk.say(wire, state="stopped")
    desk.pass_time(STOPPED_S - 0.1)
    desk.say(wire)
    desk.say(wire, state="stopped")
    desk.pass_time(0.2)
    assert [] == desk.told


def test_ranks_that_are_all_stopped_wait_for_nobody(desk: _Desk) -> None:
    wire = desk.join(1)
    desk.say(wire, state="stopped")
    desk.hub.report(0, RUNNING | {"state": "stopped"})
    for _ in range(20):
        desk.pass_time(1)
        desk.say(wire, state="stopped")
    desk.hub.report(0, RUNNING)  # The first that goes on does not blame the others at once.
    desk.pass_time(STOPPED_S - 0.1)
    assert [] == desk.told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_ended_is_given_up_at_once(desk: _Desk, rank: int) -> None:
    wire = desk.join(1)
    ended = {"state": "ended", "how": "was killed by SIGKILL"}
    if rank == 0:
        desk.hub.report(0, RUNNING | ended)
    else:
        desk.say(wire, **ended)
    assert [(rank, "was killed by SIGKILL")] == desk.found()


def test_a_rank_that_has_left_is_not_given_up(desk: _Desk) -> None:
    wire = desk.join(1)
    desk.say(wire, state="left")
    wire.close()
    desk.run()
    desk.pass_time(2 * SILENT_S)
    assert [] == desk.told


def test_a_connection_that_ends_without_a_word_gives_its_rank_up(desk: _Desk) -> None:
    desk.join(1).close()
    desk.run()
    assert [(1, "was killed together with its sentinel")] == desk.found()


def test_a_message_without_its_parts_gives_its_rank_up(desk: _Desk) -> None:
    wire = desk.join(1)
    wire.send({"state": "running"})
    desk.run()
    assert [(1, "was killed together with its sentinel")] == desk.found()


@pytest.mark.parametrize(
    "hello",
    [
        {"rank": 1, "host": "x"},
        {"secret": "", "rank": 1, "host": "x"},
        {"secret": SECRET + "x", "rank": 1, "host": "x"},
        {"secret": None, "rank": 1, "host": "x"},
        {"secret": SECRET, "host": "x"},
        {"secret": SECRET, "rank": "one", "host": "x"},
        {"secret": SECRET, "rank": 0, "host": "x"},  # That is the hub's own.
    ],
)
def test_a_stranger_is_not_let_in_and_accuses_nobody(desk: _Desk, hello: Message) -> None:
    wire = desk.connect()
    wire.send(hello | RUNNING)
    desk.run()
    with pytest.raises(ConnectionError, match="closed"):
        desk.heard_by(wire)
    desk.pass_time(2 * SILENT_S)
    assert [] == desk.told


def test_a_stranger_that_says_nothing_is_sent_away(desk: _Desk) -> None:
    wire = desk.connect()
    desk.run()
    desk.pass_time(4.9)
    assert [] == desk.heard_by(wire)
    desk.pass_time(0.2)
    with pytest.raises(ConnectionError, match="closed"):
        desk.heard_by(wire)


def test_more_strangers_than_there_is_room_for_are_sent_away(desk: _Desk) -> None:
    wires = [desk.connect() for _ in range(65)]
    desk.run()
    with pytest.raises(ConnectionError, match="closed"):
        desk.heard_by(wires[-1])
    assert [] == desk.heard_by(wires[0])


def test_the_end_of_the_hub_is_told_to_all(desk: _Desk) -> None:
    wire = desk.join(1)
    desk.hub.beat(RUNNING)
    desk.hub.end()
    assert [{"welcome": True}, {"beat": RUNNING}, {"over": True}] == desk.heard_by(wire)


def test_the_hub_listens_at_its_address_only(desk: _Desk) -> None:
    assert "127.0.0.1" == desk.hub._listener.getsockname()[0]
