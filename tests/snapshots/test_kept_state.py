"""Snapshots in memory: what outlives ranks, who may ask for it, and when it is dropped."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from limits import HANG_S
from penstock.errors import CheckpointError
from penstock.snapshots import KeptState, keeper_client, kept_state
from penstock.snapshots.keeper_client import Entry, KeeperClient, kept_step, newest_complete

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the one that starts ranks."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(kept_state.os, "getppid", lambda: process.pid)
    yield process
    process.kill()
    process.communicate()


def alone(value: Any, what: str) -> list[Any]:
    """Gather from the only rank."""
    return [value]


def tensors(step: int) -> dict[str, Tensor]:
    return {
        "model.weight": torch.full((3, 5), step + 0.5),
        "model.half": torch.full((7,), step, dtype=torch.bfloat16),
        "model.flags": torch.tensor([True, False, True]),
        "model.none": torch.empty(0, 4),
        "optimizer.state.weight.step": torch.tensor(float(step)),
    }


def test_newest_snapshot_is_read_by_those_who_come_after(
    launcher: subprocess.Popen[bytes],
) -> None:
    first = KeptState(alone)
    assert None is first.read()
    for step in (10, 20, 30):
        first.write(step, tensors(step), {"lr": 0.1 * step, "name": "ü"})
    first._finish()
    assert 30 == kept_step(launcher.pid)
    second = KeptState(alone)
    found = second.read()
    assert found is not None
    assert (30, 1) == (found.step, found.num_ranks)
    [part] = found.parts
    assert {"lr": 0.1 * 30, "name": "ü"} == part.extra
    expected = tensors(30)
    assert expected.keys() == part.tensors.keys()
    for name, value in expected.items():
        assert value.dtype == part.tensors[name].dtype
        assert torch.equal(value, part.tensors[name])
    second.close()


def test_rank_has_two_copies_and_the_snapshot_that_it_began_with(
    launcher: subprocess.Popen[bytes],
) -> None:
    def kept(state: KeptState) -> list[tuple[str, int]]:
        state._finish()
        return sorted((e.attempt, e.about["step"]) for e in state._keeper.entries())

    first = KeptState(alone)
    for step in (1, 2, 3):
        first.write(step, tensors(step), {})
    assert [2, 3] == [step for _, step in kept(first)]
    second = KeptState(alone)
    second.read()
    assert [3] == [step for _, step in kept(second)]
    second.write(4, tensors(4), {})
    assert {3, 4} == {step for _, step in kept(second)}
    second.write(5, tensors(5), {})
    assert [(second._attempt, 4), (second._attempt, 5)] == kept(second)
    second.close()


def test_keeper_ends_when_it_keeps_nothing_and_with_its_launcher(
    launcher: subprocess.Popen[bytes],
) -> None:
    def ends() -> bool:
        until_s = time.monotonic() + HANG_S
        while (found := keeper_client._connect(launcher.pid)) and time.monotonic() < until_s:
            found.close()
            time.sleep(0.02)
        return found is None

    first = KeptState(alone)
    first.write(1, tensors(1), {})
    first.close()
    assert ends()
    second = KeptState(alone)
    second.write(1, tensors(1), {})
    second._finish()
    name = keeper_client._name(launcher.pid)
    launcher.kill()
    launcher.wait()
    until_s = time.monotonic() + HANG_S
    while name in Path("/proc/net/unix").read_text() and time.monotonic() < until_s:
        time.sleep(0.02)
    with pytest.raises(CheckpointError, match=r"the keeper of snapshots cannot be asked to list"):
        second._keeper.entries()


def test_step_that_one_rank_lacks_is_not_complete() -> None:
    def entry(attempt: str, rank: int, step: int, ranks: int = 2) -> Entry:
        return Entry(attempt, rank, step % 2, {"step": step, "ranks": ranks})

    entries = [entry("a", 0, 10), entry("a", 1, 10), entry("a", 0, 20)]
    assert ("a", 10) == newest_complete(entries)
    assert ("b", 15) == newest_complete([*entries, entry("b", 0, 15, ranks=1)])
    assert ("a", 20) == newest_complete([*entries, entry("a", 1, 20)])
    assert None is newest_complete(entries[2:])


def test_snapshots_after_a_read_in_the_same_process_are_kept(
    launcher: subprocess.Popen[bytes],
) -> None:
    """Such as that of a training which goes back once its loss is too large."""
    kept = KeptState(alone)
    for step in (10, 20):
        kept.write(step, tensors(step), {})
    assert kept.read() is not None
    for step in (30, 40, 50):
        kept.write(step, tensors(step), {})
        kept._finish()
        found = KeptState(alone).read()
        assert found is not None
        assert step == found.step
        assert torch.equal(tensors(step)["model.weight"], found.parts[0].tensors["model.weight"])
        assert kept.read() is not None  # The other has told the keeper to drop the rest.
    kept.close()


def test_damaged_memory_is_refused(launcher: subprocess.Popen[bytes]) -> None:
    kept = KeptState(alone)
    kept.write(10, tensors(10), {})
    kept._finish()
    memory = kept._copies[0]
    assert memory is not None
    memory[-1] ^= 1
    with pytest.raises(CheckpointError, match=r"rank 0's part of the snapshot of step 10 is damag"):
        KeptState(alone).read()


def test_what_cannot_be_kept_is_refused(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptState(alone)
    with pytest.raises(CheckpointError, match=r"extra, or a setting .* cannot be kept: Object of"):
        kept.write(1, tensors(1), {"a": object()})
    monkeypatch.setattr(kept_state, "is_dtensor", lambda value: True)
    with pytest.raises(CheckpointError, match=r"'model.weight' is spread over ranks as a DTensor"):
        kept.write(1, tensors(1), {})


def test_keeper_that_cannot_be_trusted_or_had_is_refused(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = KeeperClient(launcher.pid)
    with monkeypatch.context() as patched:
        patched.setattr(keeper_client, "user_of", lambda found: os.getuid() + 1)
        with pytest.raises(
            CheckpointError, match=r"is a process of user \d+. Expected one of user"
        ):
            KeeperClient(launcher.pid)
    with pytest.raises(CheckpointError, match=r"cannot be asked to sing \(it has closed"):
        first.ask("sing", attempt="", rank=0, copy=0)
    first.close()
    with monkeypatch.context() as patched:
        patched.setattr(keeper_client, "_connect", lambda launcher: None)
        patched.setattr(keeper_client, "_MEETING_S", 0.0)
        with pytest.raises(CheckpointError, match=r"could not be started \(exit code 0\)"):
            KeeperClient(launcher.pid)
    monkeypatch.setattr(keeper_client.sys, "platform", "darwin")
    with pytest.raises(CheckpointError, match=r"need Linux, and this is darwin"):
        KeeperClient(launcher.pid)
    assert 0 == kept_step(launcher.pid)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
def test_other_users_get_nothing(launcher: subprocess.Popen[bytes]) -> None:
    kept = KeptState(alone)
    kept.write(10, tensors(10), {})
    kept._finish()
    code = (
        "import socket, sys\n"
        "found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "found.connect('\\0' + sys.argv[1])\n"
        "try:\n"
        '    found.send(b\'{"do": "list"}\')\n'
        "    print(found.recv(1000))\n"
        "except OSError:\n"
        "    print(b'')\n"
    )
    name = keeper_client._name(launcher.pid)
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", code, name],
        user=65534,
        env={"PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ("b''\n", "") == (done.stdout, done.stderr)
    kept.close()
