"""Runs scripts on several processes by torch's own launcher."""

import os
import subprocess
import sys
from pathlib import Path

from limits import PROCESS_S


def launch(script: Path, folder: Path, *, num_ranks: int = 2) -> str:
    """Run the script in `folder`, where it may leave files; returns what its ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={num_ranks}", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=folder,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout
