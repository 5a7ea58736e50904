"""The connection of a rank to the keeper of its machine."""

import json
import mmap
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import CheckpointError
from penstock.snapshots import keeper
from penstock.snapshots.keeper import user_of

_ANSWER_S = 60.0
_MEETING_S = 5.0
_LARGEST_ANSWER = 1 << 20


class Entry(NamedTuple):
    """Memory that is complete: a rank's part of a snapshot."""

    attempt: str
    """The ranks that made it together."""
    rank: int
    copy: int
    about: dict[str, Any]
    """Its step, the number of ranks of its attempt, its bytes and their checksum."""


class KeeperClient:
    """A connection to the keeper of one launcher, which is started if there is none."""

    def __init__(self, launcher: int) -> None:
        if not sys.platform.startswith("linux"):
            raise CheckpointError(
                f"snapshots in memory need Linux, and this is {sys.platform}. Save to a folder "
                "instead."
            )
        if launcher == 0:
            raise CheckpointError(
                "this process has no parent in its container, so no process could keep snapshots "
                "for those that come after it. Expected a launcher there, such as torchrun: start "
                "the rank by one, or save to a folder."
            )
        self._socket = _reach(launcher)
        # A rank that failed never closes it, and may live on as a rank of the next attempt.
        self._end = weakref.finalize(self, self._socket.close)

    def ask(self, do: str, *, given: int | None = None, **facts: Any) -> tuple[Any, list[int]]:
        """Return the keeper's answer, and the file descriptors that it hands over."""
        try:
            request = json.dumps({"do": do, **facts}).encode()
            socket.send_fds(self._socket, [request], [] if given is None else [given])
            data, handed, _, _ = socket.recv_fds(self._socket, _LARGEST_ANSWER, 1)
            if not data:
                raise ConnectionError("it has closed the connection")
            return json.loads(data), list(handed)
        except OSError as error:
            raise CheckpointError(
                f"the keeper of snapshots cannot be asked to {do} ({error}). Expected it to live "
                "as long as the launcher: start the training again, from a checkpoint."
            ) from error

    @property
    def name(self) -> str:
        """The name of the keeper: no other has it, on any machine."""
        (name, _), _ = self.ask("list")
        return str(name)

    def entries(self) -> list[Entry]:
        """Return what is complete."""
        (_, found), _ = self.ask("list")
        return [Entry(*each) for each in found]

    def make_memory(
        self, before: mmap.mmap | None, size: int, attempt: str, rank: int, copy: int
    ) -> mmap.mmap:
        """Return memory that the keeper holds, and knows is not complete now.

        That is what it held `before`, if the size is the same.
        """
        key: dict[str, Any] = {"attempt": attempt, "rank": rank, "copy": copy}
        if before is not None and len(before) == size:
            self.ask("begin", **key)
            return before
        number = os.memfd_create("penstock-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(number, size)
            memory = mmap.mmap(number, size)
            self.ask("keep", given=number, **key)
        finally:
            os.close(number)
        return memory

    def complete(self, attempt: str, rank: int, copy: int, about: Mapping[str, Any]) -> None:
        """Let the keeper know that memory is complete."""
        self.ask("done", attempt=attempt, rank=rank, copy=copy, about=dict(about))

    def map(self, entry: Entry) -> mmap.mmap:
        """Return the memory of what is complete."""
        attempt, rank, copy, about = entry
        _, [number] = self.ask("fetch", attempt=attempt, rank=rank, copy=copy)
        try:
            return mmap.mmap(number, about["bytes"])
        finally:
            os.close(number)

    def close(self) -> None:
        """End the connection."""
        self._end()


def newest_complete(entries: list[Entry]) -> tuple[str, int] | None:
    """Return the attempt and the step of the newest snapshot that all of its ranks have."""
    ranks: dict[tuple[int, str, int], set[int]] = {}
    for entry in entries:
        key = (entry.about["step"], entry.attempt, entry.about["ranks"])
        ranks.setdefault(key, set()).add(entry.rank)
    whole = [key for key, held in ranks.items() if len(held) == key[2]]
    if not whole:
        return None
    step, attempt, _ = max(whole)
    return attempt, step


def kept_step(launcher: int) -> int:
    """Return the step of the newest snapshot that the ranks of a launcher have left; 0 if none."""
    if not sys.platform.startswith("linux") or (found := _connect(launcher)) is None:
        return 0
    found.close()
    client = KeeperClient(launcher)
    try:
        newest = newest_complete(client.entries())
        return 0 if newest is None else newest[1]
    finally:
        client.close()


def _name(launcher: int) -> str:
    """Return the name of a launcher's keeper; a later process of the same number has another."""
    with open(f"/proc/{launcher}/stat", encoding="utf-8", errors="replace") as file:
        began = file.read().rpartition(")")[2].split()[19]
    return f"penstock-keeper-{os.getuid()}-{launcher}-{began}"


def _reach(launcher: int) -> socket.socket:
    """Connect to a keeper, and start one if there is none; another rank may be quicker.

    One that ends, as it keeps nothing any more, may still have the name for a moment.
    """
    until_s = time.monotonic() + _MEETING_S
    while True:
        if (found := _connect(launcher)) is not None:
            return found
        code = _start(launcher)
        if (found := _connect(launcher)) is not None:
            return found
        if time.monotonic() > until_s:
            raise CheckpointError(
                f"the keeper of snapshots could not be started (exit code {code}). Expected a "
                "process that this one may start: save to a folder instead."
            )
        time.sleep(0.05)


def _connect(launcher: int) -> socket.socket | None:
    """Connect to a keeper, if there is one of this user that answers."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.settimeout(_ANSWER_S)
        found.connect(f"\0{_name(launcher)}")
        user = user_of(found)
        if user == os.getuid():
            found.send(b'{"do": "list"}')
            if found.recv(_LARGEST_ANSWER):
                return found
    except OSError:
        found.close()
        return None
    found.close()
    if user == os.getuid():
        return None
    raise CheckpointError(
        f"the keeper of snapshots is a process of user {user}. Expected one of user "
        f"{os.getuid()}, which runs this: let nobody else use its name."
    )


def _start(launcher: int) -> int:
    """Start a keeper, unless there is one; return the exit code of what has started it."""
    return subprocess.run(
        [sys.executable, "-I", "-S", keeper.__file__, _name(launcher), str(launcher)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=_ANSWER_S,
        check=False,
    ).returncode
