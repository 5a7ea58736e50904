"""Trainings by the command line whose ranks are killed, for tests/dist. Linux only."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from launcher import FOR_RANKS, launch_command
from limits import HANG_S, PROCESS_S
from process_marks import marked, none_is_left, processes_with, rank_processes

MODEL = ["--layers=8", "--width=16", "--heads=2", "--context=8", "--batch=8", "--steps=9"]
PENSTOCK = [sys.executable, "-m", "penstock"]
Steps: TypeAlias = list[tuple[int, float]]


def run_with_kills(
    command: Sequence[str], *, kills: dict[int, int] | None = None
) -> tuple[Steps, str]:
    """Train; after some steps, kill a rank. Returns all steps with their losses, and the errors."""
    left = dict(kills or {})
    steps: Steps = []
    with marked() as (mark, environment):
        process = subprocess.Popen(
            [*command, *MODEL, "--json"],
            env={**os.environ, **FOR_RANKS, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            done = json.loads(line)
            steps.append((done["step"], done["loss"]))
            if (rank := left.pop(done["step"], None)) is not None:
                os.kill(find_rank(mark, rank), signal.SIGKILL)
        _, errors = process.communicate(timeout=PROCESS_S)
        assert 0 == process.returncode, errors
        assert none_is_left(mark, HANG_S)  # The keeper of snapshots sees its launcher end.
    return steps, errors


def find_rank(mark: str, rank: int) -> int:
    """The process of a rank, under torchrun or our own launcher."""
    if ours := rank_processes(mark):
        return ours[rank]
    is_rank = f"\0RANK={rank}\0".encode()
    found = [pid for pid, env in processes_with(mark).items() if is_rank in env]
    return min(found)


@cache
def undisturbed(*options: str, num_ranks: int) -> Steps:
    """All steps of the same training with their losses, if nobody is killed."""
    with TemporaryDirectory() as folder:
        command = ["train", *MODEL, *options, "--json"]
        printed = launch_command(command, Path(folder), num_ranks=num_ranks)
    done = [json.loads(line) for line in printed.splitlines()]
    return [(each["step"], each["loss"]) for each in done]


def check(steps: Steps, expected_order: list[int], expected: Steps) -> None:
    assert expected_order == [step for step, _ in steps]
    losses = dict(expected)
    assert [(step, losses[step]) for step, _ in steps] == steps
