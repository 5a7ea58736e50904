"""Copies of snapshots on other machines, so that one that is lost does not take them along.

    rank 0 ─┐                              ┌─ rank 2
    rank 1 ─┤ keeper ◀── copies of 2, 3 ── ┤ keeper
            └────────── copies of 0, 1 ──▶ ┘ rank 3

A rank listens for others while it has snapshots. Each connection carries one request, a line of
JSON with the secret of these ranks, and its answer; memory follows as bytes.

    put    attempt, rank, copy, about (and bytes)    keeps a copy here
    fetch  attempt, rank, copy                       the bytes of what is kept here
"""

import hmac
import json
import logging
import mmap
import socket
import socketserver
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import CheckpointError
from penstock.snapshots.keeper_client import Entry, KeeperClient

LOGGER = logging.getLogger("penstock")

_WAIT_S = 60.0
"""How long the other end may take for a part of a message."""
_LONGEST_LINE = 1 << 16
_PIECE = 1 << 20


class Address(NamedTuple):
    """Where a rank listens."""

    host: str
    port: int


class CopyServer:
    """Keeps copies for ranks of other machines in the keeper of this one."""

    def __init__(self, host: str, secret: str, launcher: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server(host, family, secret, launcher)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = Address(host, self._server.server_address[1])

    @property
    def copies(self) -> dict[tuple[str, int, int], mmap.mmap]:
        """The memory of the copies: by attempt, rank and copy."""
        return self._server.copies

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, host: str, family: int, secret: str, launcher: int) -> None:
        self.address_family = family
        self.secret, self.launcher = secret, launcher
        self.copies: dict[tuple[str, int, int], mmap.mmap] = {}
        super().__init__((host, 0), _Request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a request gets no answer; the other end goes on without."""
        LOGGER.warning(
            "a request for copies of snapshots, from %s, has failed: %s.",
            client_address[0],
            sys.exc_info()[1],
        )


class _Request(socketserver.StreamRequestHandler):
    server: _Server
    timeout = _WAIT_S

    def handle(self) -> None:
        request = json.loads(_line(self.rfile))
        if not hmac.compare_digest(str(request["secret"]).encode(), self.server.secret.encode()):
            return
        key = str(request["attempt"]), int(request["rank"]), int(request["copy"])
        keeper = KeeperClient(self.server.launcher)
        try:
            if request["do"] == "put":
                self._put(keeper, key, dict(request["about"]))
            else:
                self._fetch(keeper, key)
        finally:
            keeper.close()

    def _put(self, keeper: KeeperClient, key: tuple[str, int, int], about: dict[str, Any]) -> None:
        memory = keeper.make_memory(self.server.copies.get(key), int(about["bytes"]), *key)
        self.server.copies[key] = memory
        with memoryview(memory) as view:
            _read_into(self.rfile, view)
        if zlib.crc32(memory) != about["checksum"]:
            raise ValueError("the bytes are not those that were sent")
        keeper.complete(*key, about)
        self.wfile.write(b'{"is_kept": true}\n')

    def _fetch(self, keeper: KeeperClient, key: tuple[str, int, int]) -> None:
        [entry] = [each for each in keeper.entries() if each[:3] == key]
        with keeper.map(entry) as memory, memoryview(memory) as view:
            self.wfile.write(json.dumps({"bytes": len(memory)}).encode() + b"\n")
            for start in range(0, len(view), _PIECE):
                self.wfile.write(view[start : start + _PIECE])


def neighbours(homes: Sequence[str]) -> list[int | None]:
    """Return the rank on another machine that keeps each rank's copies; None if there is none.

    `homes` names the machine of each rank. The ranks of a machine share those of the next one.
    """
    machines = list(dict.fromkeys(homes))
    if len(machines) == 1:
        return [None] * len(homes)
    ranks = {
        machine: [r for r, home in enumerate(homes) if home == machine] for machine in machines
    }
    found: list[int | None] = []
    for rank, home in enumerate(homes):
        following = ranks[machines[(machines.index(home) + 1) % len(machines)]]
        found.append(following[ranks[home].index(rank) % len(following)])
    return found


def put_copy(
    to: Address, secret: str, key: Mapping[str, Any], about: Mapping[str, Any], memory: mmap.mmap
) -> None:
    """Let another machine keep a copy; raise an OSError if it does not."""
    with socket.create_connection(to, _WAIT_S) as connection:
        request = {"secret": secret, "do": "put", **key, "about": dict(about)}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with memoryview(memory) as view:
            for start in range(0, len(view), _PIECE):
                connection.sendall(view[start : start + _PIECE])
        with connection.makefile("rb") as answer:
            if not answer.readline(_LONGEST_LINE):
                raise ConnectionError("it has not kept the copy")


def fetch_copy(source: Address, secret: str, entry: Entry) -> mmap.mmap:
    """Return the memory of a copy that another machine keeps."""
    key = {"attempt": entry.attempt, "rank": entry.rank, "copy": entry.copy}
    try:
        with socket.create_connection(source, _WAIT_S) as connection:
            request = {"secret": secret, "do": "fetch", **key}
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answer:
                size = int(json.loads(_line(answer))["bytes"])
                memory = mmap.mmap(-1, size)
                with memoryview(memory) as view:
                    _read_into(answer, view)
                return memory
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the snapshot of rank {entry.rank} cannot be had from {source.host} ({error}). "
            "Expected a rank that answers there: go on from a checkpoint."
        ) from error


def _line(stream: Any) -> bytes:
    line: bytes = stream.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return line


def _read_into(stream: Any, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done : done + _PIECE])
        if not count:
            raise ConnectionError("the connection was closed")
        done += count
