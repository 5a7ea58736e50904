"""Copies of snapshots on other machines: a machine that is lost takes none along."""

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from limits import HANG_S
from penstock.errors import CheckpointError
from penstock.snapshots import KeptState, kept_state
from penstock.snapshots.keeper_client import KeeperClient
from penstock.snapshots.neighbour import CopyServer, fetch_copy, neighbours, put_copy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")


class Machines:
    """Launchers that stand for machines, and ranks on them, which are threads."""

    def __init__(self) -> None:
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._here = threading.local()

    def launcher(self) -> int:
        """The launcher of this thread's rank."""
        name = self._here.name
        if name not in self.launchers:
            self.launchers[name] = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
            )
        return self.launchers[name].pid

    def lose(self, name: str) -> None:
        process = self.launchers.pop(name)
        process.kill()
        process.communicate()

    def run(self, layout: str, work: Callable[[KeptState], Any]) -> list[Any]:
        """Do the work of ranks, on the machines that the letters name; returns their results."""
        barrier = threading.Barrier(len(layout), timeout=HANG_S)
        said: list[Any] = [None] * len(layout)

        def run_rank(rank: int) -> Any:
            def gather(value: Any, what: str) -> list[Any]:
                said[rank] = json.loads(json.dumps(value))
                barrier.wait()
                found = list(said)
                barrier.wait()
                return found

            self._here.name = layout[rank]
            try:
                return work(KeptState(gather))
            except BaseException:
                barrier.abort()
                raise

        for name in layout:  # One at a time.
            self._here.name = name
            self.launcher()
        with ThreadPoolExecutor(len(layout)) as pool:
            ranks = [pool.submit(run_rank, rank) for rank in range(len(layout))]
        failed = [error for rank in ranks if (error := rank.exception()) is not None]
        for error in failed:  # The others only waited for these.
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [rank.result() for rank in ranks]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    found = Machines()
    monkeypatch.setattr(kept_state.os, "getppid", found.launcher)
    monkeypatch.setattr(kept_state, "address_among_ranks", lambda: "127.0.0.1")
    yield found
    for name in list(found.launchers):
        found.lose(name)


def keep(kept: KeptState, *, steps: tuple[int, ...] = (10, 20)) -> None:
    for step in steps:
        kept.write(step, {"weight": torch.full((100,), step + kept.rank)}, {"rank": kept.rank})
    kept._finish()
    kept._gather(None, "")


def read(kept: KeptState) -> tuple[int, dict[int, float]] | None:
    found = kept.read()
    if found is None:
        return None
    parts = {part.rank: part.tensors["weight"].unique().item() for part in found.parts}
    assert all(part.extra == {"rank": part.rank} for part in found.parts)
    return found.step, parts


def test_neighbours_are_on_the_next_machine_and_share_the_work() -> None:
    assert [None, None] == neighbours("aa")
    assert [1, 0] == neighbours("ab")
    assert [2, 3, 0, 1] == neighbours("aabb")
    assert [2, 3, 4, 4, 0] == neighbours("aabbc")
    assert [1, 2, 0, 4, 2] == neighbours("abcab")


def test_lost_machine_takes_no_snapshots_along(machines: Machines) -> None:
    machines.run("aabb", keep)
    machines.lose("b")
    expected = {0: 20, 1: 21, 2: 22, 3: 23}
    # Rank 3 is on a new machine, which has nothing: it is handed its own part alone.
    found = machines.run("aaac", read)
    assert [(20, expected)] * 3 == found[:3]
    assert (20, {3: 23}) == found[3]


def test_fewer_ranks_get_the_parts_of_all(machines: Machines) -> None:
    machines.run("aabb", keep)
    machines.lose("a")
    expected = (20, {0: 20, 1: 21, 2: 22, 3: 23})
    assert [expected] * 3 == machines.run("cbb", read)


def test_copies_are_bounded_and_dropped_at_the_end(machines: Machines) -> None:
    def work(kept: KeptState) -> tuple[list[Any], list[Any]]:
        keep(kept, steps=(1, 2, 3, 4))
        held = sorted((entry.rank, entry.about["step"]) for entry in kept._keeper.entries())
        kept._gather(None, "")
        kept.close()
        client = KeeperClient(kept._launcher)
        try:
            return held, client.entries()
        finally:
            client.close()

    both = [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert [(both, [])] * 2 == machines.run("ab", work)


def test_training_goes_on_without_a_neighbour(
    machines: Machines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(kept_state, "put_copy", refuse)
    with caplog.at_level(logging.WARNING, "penstock"):
        machines.run("ab", keep)
    assert (
        "rank 0: the snapshot of step 10 has no copy on another machine, because rank 1 at "
        "127.0.0.1 does not keep it: no route." in caplog.messages
    )
    assert [(20, {0: 20}), (20, {1: 21})] == machines.run("ab", read)


def test_old_copies_do_not_hide_newer_snapshots(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(to: Any, secret: Any, key: Any, about: Any, memory: Any) -> None:
        if about["step"] > 20:
            raise ConnectionError("no route")
        put_copy(to, secret, key, about, memory)

    monkeypatch.setattr(kept_state, "put_copy", put)
    machines.run("ab", lambda kept: keep(kept, steps=(10, 20, 30, 40, 50)))
    found = machines.run("ab", read)
    assert [50, 50] == [step for step, _ in found]
    assert [50, 51] == [parts[rank] for rank, (_, parts) in enumerate(found)]


def test_machine_without_an_address_says_so(
    machines: Machines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_address() -> str:
        raise OSError("no address of this host is known")

    monkeypatch.setattr(kept_state, "address_among_ranks", no_address)
    machines.run("ab", keep)
    assert "rank 1 keeps no copies for other machines: no address of" in "".join(caplog.messages)
    with pytest.raises(CheckpointError, match=r"rank [01] needs rank [01]'s part of the last snap"):
        machines.run("ba", read)


def test_only_those_who_know_the_secret_are_served(machines: Machines) -> None:
    machines._here.name = "a"
    launcher = machines.launcher()
    server = CopyServer("127.0.0.1", "right", launcher)
    keeper = KeeperClient(launcher)
    memory = keeper.make_memory(None, 100, "attempt", 0, 0)
    key = {"attempt": "attempt", "rank": 1, "copy": 0}
    try:
        for request in (b"", b"not JSON\n", b"[]\n", b'{"secret": "wrong"}\n', b"x" * 100_000):
            with socket.create_connection(server.address, HANG_S) as connection:
                with suppress(OSError):  # It may have been closed already.
                    connection.sendall(request)
                    connection.shutdown(socket.SHUT_WR)
                assert b"" == _all_of(connection)
        with pytest.raises(OSError, match=r"has not kept the copy|reset|Broken pipe"):
            put_copy(server.address, "wrong", key, {"bytes": 100}, memory)
        about = {"bytes": 100, "checksum": 1, "step": 1, "ranks": 2}
        with pytest.raises(OSError, match=r"has not kept the copy|reset|Broken pipe"):
            put_copy(server.address, "right", key, about, memory)  # Its checksum is another.
        assert [] == keeper.entries()
        keeper.complete("attempt", 0, 0, about)
        [entry] = keeper.entries()
        assert bytes(100) == fetch_copy(server.address, "right", entry)[:]
        for secret in ("wrong", ""):
            with pytest.raises(CheckpointError, match=r"cannot be had from 127\.0\.0\.1 \("):
                fetch_copy(server.address, secret, entry)
    finally:
        server.close()
        keeper.close()
    with pytest.raises(CheckpointError, match=r"rank 0 cannot be had .* go on from a checkpoint"):
        fetch_copy(server.address, "right", entry)


def _all_of(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(1000):
            found += piece
    except ConnectionResetError:
        pass
    return found
