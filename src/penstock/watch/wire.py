"""A connection that carries short JSON lines; it blocks only if its socket has a timeout."""

import json
import socket
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_LONGEST_LINE = 16384
_MOST_UNSENT = 1 << 20
_READ_BYTES = 65536


class Wire:
    """One end of a connection; `receive` and `send` raise a ConnectionError once it is lost."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._arrived = b""
        self._unsent = b""

    def send(self, message: Message) -> None:
        """Send a message, or keep it for `flush` if the connection has no room."""
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > _MOST_UNSENT:
            raise ConnectionError("the other end takes nothing")
        self.flush()

    def flush(self) -> None:
        """Send what there was no room for."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as exc:
            raise ConnectionError(str(exc)) from exc

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError as exc:
            raise ConnectionError(str(exc)) from exc
        if not data:
            raise ConnectionError("the other end was closed")
        *lines, self._arrived = (self._arrived + data).split(b"\n")
        if any(len(line) > _LONGEST_LINE for line in (*lines, self._arrived)):
            raise ConnectionError("a message is too long")
        return [_parse(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # Bytes that are not UTF-8 are ValueErrors too.
        raise ConnectionError("a message is not JSON") from None
    if not isinstance(message, dict):
        raise ConnectionError("a message is not an object")
    return message
