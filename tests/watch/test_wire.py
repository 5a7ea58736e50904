"""Lines of JSON over a connection that others may have opened."""

import socket
from collections.abc import Iterator

import pytest

from penstock.watch.wire import Wire


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Wire(ours), theirs


def test_messages_arrive_whole_and_in_order(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    assert [] == wire.receive()
    other.send(b'{"a": 1}\n{"b"')
    assert [{"a": 1}] == wire.receive()
    other.send(b": 2}\n")
    assert [{"b": 2}] == wire.receive()
    wire.send({"c": "½"})
    assert b'{"c": "\\u00bd"}\n' == other.recv(100)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"x" * 16385, "a message is too long"),
        (b"no json\n", "a message is not JSON"),
        (b"\xff\xfe\n", "a message is not JSON"),
        (b"[" * 16000 + b"\n", "a message is not JSON"),
        (b"[1]\n", "a message is not an object"),
    ],
)
def test_other_bytes_end_the_connection(
    ends: tuple[Wire, socket.socket], data: bytes, expected: str
) -> None:
    wire, other = ends
    other.send(data)
    with pytest.raises(ConnectionError, match=expected):
        wire.receive()


def test_an_end_that_was_closed_is_an_error(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    other.close()
    with pytest.raises(ConnectionError, match="the other end was closed"):
        wire.receive()
    with pytest.raises(ConnectionError, match="Broken pipe"):
        wire.send({})


def test_an_end_that_takes_nothing_is_an_error(ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    with pytest.raises(ConnectionError, match="the other end takes nothing"):
        wire.send({"text": "x" * (1 << 20)})


def test_what_had_no_room_is_sent_later(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    sent = 0
    while not wire._unsent:
        wire.send({"text": "x" * 10000})
        sent += 1
    other.setblocking(False)
    received = b""
    while received.count(b"\n") < sent:
        received += other.recv(1 << 20)
        wire.flush()
    assert b"" == wire._unsent
