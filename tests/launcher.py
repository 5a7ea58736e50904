"""Runs scripts and commands on several processes, as torchrun would, or by torchrun itself."""

import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from limits import PROCESS_S
from worker_pool import end_with_parent, fork_with_torch

FOR_RANKS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def launch(script: Path, folder: Path, *, num_ranks: int = 2) -> str:
    """Run the script in `folder`, where it may leave files; returns what its ranks print."""
    printed, _ = _launch(partial(_run_script, str(script)), folder, num_ranks)
    return printed


def launch_command(args: Sequence[str], folder: Path, *, num_ranks: int = 2) -> str:
    """Run `penstock` with these arguments in `folder`; returns what its ranks print.

    They must print nothing as errors.
    """
    printed, errors = _launch(partial(_run_command, list(args)), folder, num_ranks)
    assert "" == errors
    return printed


def _launch(main: Callable[[], object], folder: Path, num_ranks: int) -> tuple[str, str]:
    """Run `main` on ranks; returns what they print, and their errors.

    The ranks are forks of a process that has loaded torch: to load it takes each two seconds.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_with_torch()
    printed, errors = folder / "printed by ranks", folder / "errors of ranks"
    processes = [
        context.Process(
            target=_run_rank,
            args=(main, folder, printed, errors, rank, num_ranks, store.port),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    until_s = time.monotonic() + PROCESS_S
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(until_s - time.monotonic(), 0))
        assert [0] * num_ranks == [process.exitcode for process in processes], errors.read_text()
        return printed.read_text(), errors.read_text()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        printed.unlink(missing_ok=True)
        errors.unlink(missing_ok=True)


def _run_rank(
    main: Callable[[], object],
    folder: Path,
    printed: Path,
    errors: Path,
    rank: int,
    num_ranks: int,
    port: int,
) -> None:
    """Run `main` as one rank, in the environment that torchrun would give it."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    for file, number in ((printed, 1), (errors, 2)):
        with file.open("a") as stream:
            os.dup2(stream.fileno(), number)
    os.chdir(folder)
    os.environ |= FOR_RANKS | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # Whose server is this one's parent.
    }
    main()


def _run_script(script: str) -> None:
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def _run_command(args: list[str]) -> None:
    sys.argv = ["penstock", *args]
    runpy.run_module("penstock", run_name="__main__")


def launch_by_torchrun(script: Path, folder: Path) -> str:
    """Run the script on two ranks by torch's own launcher; returns what they print."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
        ],
        env=os.environ | FOR_RANKS,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=folder,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout
