"""A training whose ranks are killed goes on by itself, with the losses of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher import FOR_RANKS
from limits import HANG_S, PROCESS_S
from process_marks import marked, none_is_left, processes_with, rank_processes

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

MODEL = ["--layers=8", "--width=16", "--heads=2", "--context=8", "--batch=8", "--steps=9"]
PENSTOCK = [sys.executable, "-m", "penstock"]
Steps = list[tuple[int, float]]


def run(command: Sequence[str], *, kills: dict[int, int] | None = None) -> tuple[Steps, str]:
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


def check(steps: Steps, expected_order: list[int], undisturbed: Steps) -> None:
    assert expected_order == [step for step, _ in steps]
    losses = dict(undisturbed)
    assert [(step, losses[step]) for step, _ in steps] == steps


@pytest.mark.parametrize("launcher", ["penstock", "torchrun"])
def test_killed_rank_costs_the_steps_since_the_last_checkpoint(
    launcher: str, tmp_path: Path
) -> None:
    options = ["train", f"--checkpoint={tmp_path}", "--every=3", "--ranks=2"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = {
        "penstock": [*PENSTOCK, *options, "--restarts=1"],
        "torchrun": [sys.executable, "-m", *torchrun, "-m", "penstock", *options],
    }
    (tmp_path / ".step-000003.incomplete").mkdir()  # A save that was killed has left this.
    steps, errors = run(command[launcher], kills={5: 1})
    undisturbed, _ = run([*PENSTOCK, "train", "--ranks=2"])
    check(steps, [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9], undisturbed)
    if launcher == "penstock":
        [line] = errors.splitlines()
        assert "was ended by SIGKILL: going on from step 3 on 2 ranks (restart 1 of 1)" in line
        assert line.startswith("rank 1 (process ")


def test_killed_rank_of_four_costs_the_steps_since_the_last_snapshot() -> None:
    """Nothing is written to a file system, and the keeper of snapshots is gone at the end."""
    options = ["--ranks=4", "--restarts=2", "--spares=1", "--snapshot-every=2"]
    steps, errors = run([*PENSTOCK, "train", *options], kills={5: 2, 7: 0})
    undisturbed, _ = run([*PENSTOCK, "train", "--ranks=4"])
    check(steps, [1, 2, 3, 4, 5, 5, 6, 7, 7, 8, 9], undisturbed)
    assert ["going on from step 4 on 4 ranks", "going on from step 6 on 4 ranks"] == [
        line.partition(": ")[2].partition(" (")[0] for line in errors.splitlines()
    ]


def test_shards_are_kept_by_the_ranks_that_have_them() -> None:
    shape = ["--ranks=2", "--shards=2", "--microbatches=4"]
    options = [*shape, "--restarts=1", "--snapshot-every=2"]
    steps, errors = run([*PENSTOCK, "train", *options], kills={5: 3})
    undisturbed, _ = run([*PENSTOCK, "train", *shape])
    check(steps, [1, 2, 3, 4, 5, 5, 6, 7, 8, 9], undisturbed)
    assert "going on from step 4 on 2 ranks" in errors


def test_snapshots_restore_random_numbers_under_torchrun(tmp_path: Path) -> None:
    """The model of the example has dropout, which its ranks draw from generators of their own."""
    script = str(Path(__file__).parents[2] / "examples" / "snapshots.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with marked() as (mark, environment):
        disturbed, undisturbed = (
            subprocess.run(
                [*torchrun, f"--max-restarts={restarts}", script],
                env={**os.environ, **FOR_RANKS, **environment},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
                timeout=PROCESS_S,
                check=True,
            ).stdout.splitlines()
            for restarts in (1, 0)
        )
        assert none_is_left(mark, HANG_S)
    assert [f"step {step}:" for step in range(1, 11)] == [line[:-14] for line in undisturbed]
    assert [*undisturbed[:7], *undisturbed[6:]] == disturbed
    assert [] == list(tmp_path.iterdir())


def test_spare_takes_the_place_of_a_killed_rank_and_then_fewer_go_on(tmp_path: Path) -> None:
    options = ["--ranks=4", "--restarts=2", "--spares=1", "--min-ranks=3", "--every=3"]
    command = [*PENSTOCK, "train", f"--checkpoint={tmp_path}", *options]
    steps, errors = run(command, kills={4: 2, 8: 0})
    undisturbed, _ = run([*PENSTOCK, "train", "--ranks=4"])
    check(steps, [1, 2, 3, 4, 4, 5, 6, 7, 8, 7, 8, 9], undisturbed)
    spare, fewer = errors.splitlines()
    assert "going on from step 3 on 4 ranks (restart 1 of 2)" in spare
    assert "going on from step 6 on 3 ranks (restart 2 of 2)" in fewer
