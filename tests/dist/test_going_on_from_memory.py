"""A training whose ranks are killed goes on from snapshots in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from killed_trainings import PENSTOCK, check, kept_steps, run_with_kills, undisturbed
from launcher import FOR_RANKS
from limits import HANG_S, PROCESS_S
from process_marks import marked, none_is_left

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


# The last snapshot may not be complete when a rank is killed; then the one before it is used.
SNAPSHOTS = {"every": 2, "most_lost": 4}


def test_killed_rank_of_four_costs_the_steps_since_the_last_snapshot() -> None:
    """Nothing is written to a file system, and the keeper of snapshots is gone at the end."""
    options = ["--ranks=4", "--restarts=2", "--spares=1", "--snapshot-every=2"]
    steps, errors = run_with_kills([*PENSTOCK, "train", *options], kills={5: 2, 7: 0})
    again = check(steps, undisturbed("--ranks=4", num_ranks=4), **SNAPSHOTS)
    kept = kept_steps(errors)
    assert {*again} <= {*kept}
    assert [f"going on from step {step} on 4 ranks" for step in kept] == [
        line.partition(": ")[2].partition(" (")[0] for line in errors.splitlines()
    ]
    assert 2 == len(kept)


def test_shards_are_kept_by_the_ranks_that_have_them() -> None:
    shape = ["--ranks=2", "--shards=2", "--microbatches=4"]
    options = [*shape, "--restarts=1", "--snapshot-every=2"]
    steps, errors = run_with_kills([*PENSTOCK, "train", *options], kills={5: 3})
    again = check(steps, undisturbed(*shape, num_ranks=4), **SNAPSHOTS)
    [kept] = kept_steps(errors)
    assert {*again} <= {kept}
    assert f"going on from step {kept} on 2 ranks" in errors


def test_snapshots_restore_random_numbers_under_torchrun(tmp_path: Path) -> None:
    """The model of the example has dropout, which its ranks draw from generators of their own."""
    script = str(Path(__file__).parents[2] / "examples" / "snapshots.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with marked() as (mark, environment):
        disturbed, expected = (
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
    assert [f"step {step}:" for step in range(1, 11)] == [line[:-14] for line in expected]
    assert [*expected[:7], *expected[6:]] == disturbed
    assert [] == list(tmp_path.iterdir())
