"""A training whose ranks are killed goes on by itself, with the losses of an undisturbed one."""

import sys
from pathlib import Path

import pytest

from killed_trainings import PENSTOCK, check, kept_steps, run_with_kills, undisturbed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


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
    steps, errors = run_with_kills(command[launcher], kills={5: 1})
    again = check(steps, undisturbed("--ranks=2", num_ranks=2), every=3, most_lost=3)
    if launcher == "penstock":
        [kept] = kept_steps(errors)
        assert {*again} <= {kept}
        assert errors.startswith("rank 1 (process ")
        where = f"going on from step {kept} on 2 ranks (restart 1 of 1)"
        assert f"was ended by SIGKILL: {where}" in errors


def test_spare_takes_the_place_of_a_killed_rank_and_then_fewer_go_on(tmp_path: Path) -> None:
    options = ["--ranks=4", "--restarts=2", "--spares=1", "--min-ranks=3", "--every=3"]
    command = [*PENSTOCK, "train", f"--checkpoint={tmp_path}", *options]
    steps, errors = run_with_kills(command, kills={4: 2, 8: 0})
    again = check(steps, undisturbed("--ranks=4", num_ranks=4), every=3, most_lost=3)
    first, second = kept_steps(errors)
    assert {*again} <= {first, second}
    spare, fewer = errors.splitlines()
    assert f"going on from step {first} on 4 ranks (restart 1 of 2)" in spare
    assert f"going on from step {second} on 3 ranks (restart 2 of 2)" in fewer
