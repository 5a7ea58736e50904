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


def test_unchanged_program_prints_the_same_on_penstock() -> None:
    num_grads = {"1F1B": 4, "InterleavedZeroBubble": 8, "DualPipeV": 8}
    program = [*TORCHRUN, str(PROGRAM), *num_grads]
    expected, _ = start(*program)
    assert 6 * len(num_grads) == len(expected)
    printed, said = start(sys.executable, "-m", "penstock", "run", "--compare", "--", *program)
    assert expected == printed
    for schedule, count in num_grads.items():
        for rank in range(2):
            name = f"penstock: rank {rank}, Schedule{schedule}"
            [line] = [line for line in said if line.startswith(f"{name}:")]
            said.remove(line)
            assert line.startswith(f"{name}: the largest difference of any of {count}")
            assert float(re.findall(r"gradients is ([0-9.e-]+)", line)[0]) < 1e-6
    [line] = said
    assert "is Penstock's in this process" in line
