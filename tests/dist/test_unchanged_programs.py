"""A program for torch.distributed.pipelining runs on Penstock, unchanged, and is compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import FOR_RANKS
from limits import PROCESS_S

pytestmark = pytest.mark.dist

PROGRAM = Path(__file__).parents[1] / "data" / "torch_program.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*command: str) -> tuple[list[str], list[str]]:
    """Run a command; returns the lines that its ranks print, sorted, and what Penstock says."""
    done = subprocess.run(
        command,
        env=os.environ | FOR_RANKS,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
    )
    assert 0 == done.returncode, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("penstock:")]
    return sorted(done.stdout.splitlines()), sorted(said)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_unchanged_program_prints_the_same_on_penstock(schedule: str) -> None:
    program = [*TORCHRUN, str(PROGRAM), schedule]
    expected, _ = start(*program)
    assert 6 == len(expected)
    printed, said = start(sys.executable, "-m", "penstock", "run", "--compare", "--", *program)
    assert expected == printed
    num_grads = 4 if schedule == "1F1B" else 8
    for rank, line in enumerate(said[:2]):
        wanted = (
            rf"penstock: rank {rank}, Schedule\w+: the largest difference of any of {num_grads}"
        )
        assert re.match(wanted, line), line
        assert float(re.findall(r"gradients is ([0-9.e-]+)", line)[0]) < 1e-6
    assert "is Penstock's in this process" in said[2]
    assert 3 == len(said)
