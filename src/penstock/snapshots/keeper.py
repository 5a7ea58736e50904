"""A process that keeps the memory of snapshots while ranks end and begin anew.

It is started without the packages of its ranks, and runs the standard library alone. Ranks hand it
anonymous memory, and it hands that to ranks that come after them. It never looks inside.

    keep    attempt, rank, copy (and a file descriptor)   holds memory; not complete
    begin   attempt, rank, copy                           is about to change: not complete
    done    attempt, rank, copy, about                    is complete
    list                                                  the keeper's name, and what is complete
    fetch   attempt, rank, copy                           its file descriptor
    forget  attempt, rank or null, step or null           drops what these do not except

It ends when the process that starts the ranks has ended, or when it keeps nothing for nobody.
"""

import json
import os
import select
import socket
import struct
import sys
from typing import Any

LARGEST = 1 << 16
"""The most bytes in a request."""
_ABANDONED_S = 3600.0
"""How long memory is kept for a launcher that starts no ranks again."""


class Keeper:
    """The memory that is kept, and the connections of the ranks."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._held: dict[tuple[str, int, int], int] = {}
        self._about: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._name = os.urandom(8).hex()

    def serve(self, launcher: int) -> None:
        """Answer ranks until nobody needs this process any more."""
        poll = select.poll()
        poll.register(launcher, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        had_client = False
        while True:
            ready = [number for number, _ in poll.poll(_ABANDONED_S * 1000)]
            if launcher in ready or not (ready or self._clients):
                return
            for number in ready:
                if number == self._listener.fileno():
                    client, _ = self._listener.accept()
                    if user_of(client) != os.getuid():
                        client.close()
                        continue
                    had_client = True
                    self._clients[client.fileno()] = client
                    poll.register(client, select.POLLIN)
                elif not self._answer(self._clients[number]):
                    poll.unregister(number)
                    self._clients.pop(number).close()
            if had_client and not self._clients and not self._held:
                return

    def _answer(self, client: socket.socket) -> bool:
        """Answer one request; return False if the rank has ended, or asks for what cannot be."""
        given: list[int] = []
        try:
            data, given, _, _ = socket.recv_fds(client, LARGEST, 1)
            if not data:
                return False
            request = json.loads(data)
            reply, handed = self._do(request, given)
            socket.send_fds(client, [json.dumps(reply).encode()], handed)
            return True
        except (OSError, ValueError, LookupError, TypeError):
            return False
        finally:
            for number in given:
                os.close(number)

    def _do(self, request: dict[str, Any], given: list[int]) -> tuple[Any, list[int]]:
        match request["do"]:
            case "list":
                return [self._name, [[*key, about] for key, about in self._about.items()]], []
            case "forget":
                self._forget(request)
                return None, []
        key = (str(request["attempt"]), int(request["rank"]), int(request["copy"]))
        match request["do"]:
            case "keep":
                [number] = given
                self._drop(key)
                self._held[key] = os.dup(number)
            case "begin" | "done" if key not in self._held:
                raise LookupError(key)
            case "begin":
                self._about.pop(key, None)
            case "done":
                self._about[key] = dict(request["about"])
            case "fetch":
                return None, [self._held[key]]
            case unknown:
                raise ValueError(unknown)
        return None, []

    def _forget(self, request: dict[str, Any]) -> None:
        """Drop all but the attempt that is named, or a rank's part of it, or but one step."""
        attempt, rank, step = request["attempt"], request["rank"], request["step"]
        for key in list(self._held):
            is_named = key[0] == attempt
            if rank is not None:
                is_dropped = is_named and key[1] == rank
            elif step is not None:
                is_dropped = not (is_named and self._about.get(key, {}).get("step") == step)
            else:
                is_dropped = not is_named
            if is_dropped:
                self._drop(key)

    def _drop(self, key: tuple[str, int, int]) -> None:
        self._about.pop(key, None)
        if key in self._held:
            os.close(self._held.pop(key))


def user_of(client: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    found = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def main(name: str, launcher: int) -> None:
    """Listen under a name, then serve in a process of its own; return if another listens there."""
    watched = os.pidfd_open(launcher)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return
    listener.listen(128)
    if os.fork() == 0:
        Keeper(listener).serve(watched)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
