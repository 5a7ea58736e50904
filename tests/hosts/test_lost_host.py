"""A host that is lost takes no snapshots along: the training goes on with those of another."""

import json
import subprocess
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher import launch_command
from limits import HANG_S, PROCESS_S
from network_hosts import Hosts

pytestmark = pytest.mark.dist

MODEL = ["train", "--layers=4", "--width=16", "--heads=2", "--context=8", "--batch=4", "--json"]
MODEL += ["--steps=100", "--microbatches=2"]
CRASH_AFTER = 8


class Run:
    """The launchers of two hosts, and the steps that their ranks report."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self.steps: list[tuple[int, float]] = []
        self._is_far = threading.Event()
        self._running: list[tuple[subprocess.Popen[Any], threading.Thread]] = []

    def start(self, host: int) -> None:
        run = self._hosts.torchrun(host, num_hosts=2, per_host=1, how="c10d")
        options = ["--max-restarts=3", "-m", "penstock", *MODEL, "--snapshot-every=3"]
        with open(self._folder / "errors", "ab") as errors:
            process = self._hosts.start(
                host,
                [*run, *options],
                env=self._hosts.environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        thread.start()
        self._running.append((process, thread))

    def _read(self, process: subprocess.Popen[Any]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            done = json.loads(line)
            self.steps.append((done["step"], done["loss"]))
            if done["step"] >= CRASH_AFTER:
                self._is_far.set()

    def wait_until_far(self) -> None:
        assert self._is_far.wait(PROCESS_S), (self._folder / "errors").read_text()

    def finish(self) -> list[int]:
        """Wait for all launchers; returns how they ended."""
        for process, thread in self._running:
            process.wait(PROCESS_S)
            thread.join(HANG_S)
        return [process.returncode for process, _ in self._running]

    def end(self) -> None:
        for process, _ in self._running:
            with process:
                process.kill()


def _undisturbed(folder: Path) -> Sequence[tuple[int, float]]:
    done = [json.loads(line) for line in launch_command(MODEL, folder).splitlines()]
    return [(each["step"], each["loss"]) for each in done]


def test_training_goes_on_with_the_copies_of_another_host(hosts: Hosts, tmp_path: Path) -> None:
    """All that runs on host 1 is killed, its launcher included, and only that is started again.

    Host 0 has the store of the launchers, which fail without it.
    """
    run = Run(hosts, tmp_path)
    try:
        for each in (0, 1):
            run.start(each)
        run.wait_until_far()
        hosts.crash(1)
        run.start(1)
        ended = run.finish()
    finally:
        run.end()
    assert [0, 0] == [code for code in ended if code != -9], (tmp_path / "errors").read_text()
    expected = dict(_undisturbed(tmp_path))
    assert list(range(1, 101)) == sorted(expected)
    assert [(step, expected[step]) for step, _ in run.steps] == run.steps
    numbers = [step for step, _ in run.steps]
    [last] = [n for n, following in pairwise(numbers) if following <= n]
    assert 1 == numbers[numbers.index(last) + 1] % 3  # Every third step was kept.
    assert numbers[numbers.index(last) + 1] > 1
    assert [] == hosts.processes()
