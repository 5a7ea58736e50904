"""Starts the ranks of a run as processes of this machine, by torch's own launcher.

The launcher ends all ranks when one fails or when it is told to stop itself. What is added here is
how that is told: a failure in one line, from the rank that the others followed.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import CommError
from penstock.ir import Rank

_LAUNCHER = "PENSTOCK_LAUNCHER"
"""For ranks that were started here: the process that started them."""
_LOOK_S = 0.5
STOPPED_BY_ANOTHER = 3
"""The exit code of a rank that failed only because another one did."""
_GRACE_S = 5  # How long ranks have to end by themselves when they are told to.


class Failure(NamedTuple):
    """How a rank ended that did not end well."""

    rank: Rank
    pid: int
    code: int
    """Negative if it was ended by a signal, as subprocess has it."""


def is_worker(env: Mapping[str, str]) -> bool:
    """Whether this process was started as a rank: here, or by torchrun or its like."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys()


def end_with_launcher(env: Mapping[str, str]) -> None:
    """End this process when the one that started it here has ended, even if that was killed."""
    if _LAUNCHER in env:
        launcher = int(env[_LAUNCHER])
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    os._exit(1)


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `penstock` with these arguments on as many ranks; returns the exit code.

    Their standard output is this process's. What they have to say of errors is told once.
    """
    # The launcher imports torch, which takes a second: whoever only asks for help need not wait.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # What the launcher would log is told in one line.
    _set_defaults()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="penstock",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            shutdown_timeout=_GRACE_S,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ERR),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "penstock", *arguments)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            return 128 + int(error.sigval)
        except ChildFailedError as error:
            failed = [Failure(rank, f.pid, f.exitcode) for rank, f in error.failures.items()]
            return _tell(first_cause(failed), Path(folder))
        _show_errors(0, Path(folder))  # Warnings, which all ranks may have.
        return 0


def _set_defaults() -> None:
    """For the ranks, where the user has not chosen."""
    os.environ[_LAUNCHER] = str(os.getpid())
    # Ranks that each took all cores would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":  # All of them are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def first_cause(failed: Sequence[Failure]) -> Failure:
    """Whose failure the others followed; the launcher ends what is left by SIGTERM."""

    def order(failure: Failure) -> tuple[bool, bool, bool]:
        was_told = failure.code in (0, -signal.SIGTERM)
        # Who was killed has failed by itself, and who says so may only follow from that.
        return was_told, failure.code == STOPPED_BY_ANOTHER, failure.code >= 0

    return min(failed, key=order)


def _tell(failure: Failure, logs: Path) -> int:
    """What a rank has to say, and its exit code."""
    if failure.code < 0:
        raise CommError(
            f"rank {failure.rank} (process {failure.pid}) was ended by "
            f"{signal.Signals(-failure.code).name}, so all others were ended too. If nobody did "
            "this, the machine may have run out of memory: train with a smaller batch or model."
        )
    _show_errors(failure.rank, logs)
    return failure.code


def _show_errors(rank: Rank, logs: Path) -> None:
    """What a rank wrote to its standard error: its last word, if that says what was wrong."""
    for path in logs.glob(f"*/attempt_0/{rank}/stderr.log"):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        is_told = bool(lines) and lines[-1].startswith("error: ")
        sys.stderr.writelines(lines[-1:] if is_told else lines)
