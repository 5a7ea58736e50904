"""Start the ranks of a run as processes on this machine, with torch's own launcher.

The launcher ends all ranks when one fails or when the launcher itself is stopped. This module adds
the report: one line with the error of the rank that failed first.
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
"""The variable that gives ranks the id of the process that started them here."""
_LOOK_S = 0.5
STOPPED_BY_ANOTHER = 3
"""The exit code of a rank that failed only because another one did."""
_GRACE_S = 5  # The time for ranks to end by themselves when they are asked to.


class Failure(NamedTuple):
    """The end of a rank that failed."""

    rank: Rank
    pid: int
    code: int
    """The exit code; negative if a signal ended it, as in subprocess."""


def is_worker(env: Mapping[str, str]) -> bool:
    """Return whether this process was started as a rank, by Penstock, torchrun or similar."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys()


def end_with_launcher(env: Mapping[str, str]) -> None:
    """End this process when the launcher that started it ends, even if that was killed."""
    if _LAUNCHER in env:
        launcher = int(env[_LAUNCHER])
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    os._exit(1)


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `penstock` with these arguments on `num_ranks` ranks; return the exit code.

    The ranks write to this process's standard output. Their errors are printed once.
    """
    # The launcher imports torch, which takes a second; --help should not wait for it.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not typed so
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # _tell replaces the launcher's log with one line.
    _set_defaults()
    # The static rendezvous shares this store, which has a free port. The c10d rendezvous would find
    # a port itself, but its heartbeat thread may print an error when the launcher is interrupted.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="penstock",
            rdzv_backend="static",
            rdzv_endpoint=f"localhost:{store.port}",
            rdzv_configs={"rank": 0},
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
        _show_errors(0, Path(folder))  # Warnings; other ranks may have the same.
        return 0


def _set_defaults() -> None:
    """Set the environment of the ranks, except for what the user has set."""
    os.environ[_LAUNCHER] = str(os.getpid())
    # Ranks that each took all cores would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":  # All ranks are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def first_cause(failed: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others; the launcher ends other ranks with SIGTERM."""

    def order(failure: Failure) -> tuple[bool, bool, bool]:
        was_told = failure.code in (0, -signal.SIGTERM)
        # A killed rank failed first; a rank that exited with an error may only have followed it.
        return was_told, failure.code == STOPPED_BY_ANOTHER, failure.code >= 0

    return min(failed, key=order)


def _tell(failure: Failure, logs: Path) -> int:
    """Print the errors of a failed rank and return its exit code."""
    if failure.code < 0:
        raise CommError(
            f"rank {failure.rank} (process {failure.pid}) was ended by "
            f"{signal.Signals(-failure.code).name}, so all others were ended too. If you did "
            "not do this, the machine may have run out of memory: train a smaller batch or model."
        )
    _show_errors(failure.rank, logs)
    return failure.code


def _show_errors(rank: Rank, logs: Path) -> None:
    """Print a rank's standard error, or only its last line if that is an error message."""
    for path in logs.glob(f"*/attempt_0/{rank}/stderr.log"):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        is_told = bool(lines) and lines[-1].startswith("error: ")
        sys.stderr.writelines(lines[-1:] if is_told else lines)
