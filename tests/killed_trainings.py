"""Trainings by the command line whose ranks are killed, for tests/dist. Linux only."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from launcher import FOR_RANKS, launch_command
from limits import HANG_S, PROCESS_S
from process_marks import marked, none_is_left, processes_with, rank_processes

MODEL = ["--layers=8", "--width=16", "--heads=2", "--context=8", "--batch=8", "--steps=20"]
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


def check(steps: Steps, expected: Steps, *, every: int, most_lost: int) -> list[int]:
    """The losses are the expected ones, and few steps are done again, from one that was kept.

    A rank that is killed after a step was read may have done some more by then, so which ones these
    are is not known before. Returns the steps after which others were done again.
    """
    numbers = [step for step, _ in steps]
    assert (1, len(expected)) == (numbers[0], numbers[-1])
    losses = dict(expected)
    assert [(step, losses[step]) for step in numbers] == steps
    again = [(last, first - 1) for last, first in pairwise(numbers) if first != last + 1]
    assert all(kept % every == 0 and 0 < last - kept <= most_lost for last, kept in again)
    return [kept for _, kept in again]


def kept_steps(errors: str) -> list[int]:
    """The steps from which our own launcher says that the training goes on, one in each line."""
    return [
        int(line.partition("going on from step ")[2].split()[0]) for line in errors.splitlines()
    ]
