"""Start the ranks of a run as processes on this machine, and start them again after a failure.

When one fails or the launcher is stopped, all end. One line says which rank failed first, and how.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from penstock.errors import CommError
from penstock.training.rank_processes import STOPPED_BY_ANOTHER, Failure, RankProcesses

_HOST = "127.0.0.1"
_LAUNCHER = "PENSTOCK_LAUNCHER"
"""The variable that gives ranks the id of the process that started them here."""
_LOOK_S = 0.5


class Attempt(NamedTuple):
    """A command to run on ranks."""

    arguments: Sequence[str]
    """Those of `penstock`."""
    num_ranks: int
    num_spares: int = 0
    """The processes that wait besides."""
    has_meshes: bool = False
    """True if ranks use DTensors: torch keeps their meshes, and would use them in another group."""


class _Ended(BaseException):
    """A signal asked the launcher to end."""


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


def has_launcher(env: Mapping[str, str]) -> bool:
    """Return whether `launch` has started this process."""
    return _LAUNCHER in env


def launch(
    first: Attempt,
    program: str,
    go_on: Callable[[Sequence[Failure]], Attempt | None] = lambda failed: None,
) -> int:
    """Run a command on ranks, which are processes of the module `program`; return the exit code.

    The ranks write to this process's standard output. Their errors are printed once. After a
    failure, `go_on` returns what to run next, or None to end.
    """
    _set_defaults()
    attempt: Attempt | None = first
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, _ended_by_signals() as ended:
        processes = RankProcesses(program, Path(folder))
        try:
            while attempt is not None:
                failed = _run(processes, attempt)
                if not failed:
                    sys.stderr.write(processes.errors_of_first())  # Warnings; others have the same.
                    return 0
                processes.sort_out(attempt.num_ranks, may_go_on=not attempt.has_meshes)
                attempt = go_on(failed)
            return _tell(first_cause(failed))
        except _Ended:
            return 128 + ended[0]
        finally:
            processes.close()


def _run(processes: RankProcesses, attempt: Attempt) -> list[Failure]:
    """Run a command once on all of its ranks; return the failures."""
    processes.prepare(attempt.num_ranks + attempt.num_spares)
    # The keys of attempts that failed are gone with their store.
    store = make_store()
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(attempt.num_ranks),
            "LOCAL_WORLD_SIZE": str(attempt.num_ranks),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # The store is here, and not on rank 0.
        }
        for rank in range(attempt.num_ranks)
    ]
    return processes.run(attempt.arguments, environments)


def make_store() -> Any:
    """Return a store at a free port that processes of this machine alone can reach.

    By itself, torch's store listens on all interfaces.
    """
    # It takes a second to load, and --help should not wait for it. The ranks load it meanwhile.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not typed so

    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Raise an error in the block on signals that ask this process to end; yield which."""
    ended: list[int] = []

    def end(signum: int, frame: FrameType | None) -> None:
        ended.append(signum)
        raise _Ended

    names = ("SIGTERM", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {signum: signal.signal(signum, end) for signum in known}
    try:
        yield ended
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


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


def _tell(failure: Failure) -> int:
    """Print the errors of a failed rank, or only the message of the last; return its exit code."""
    if failure.code < 0:
        raise CommError(
            f"{failure.describe()}, so all others were ended too. If you did "
            "not do this, the machine may have run out of memory: train a smaller batch or model."
        )
    lines = failure.errors.read_text(errors="replace").splitlines(keepends=True)
    is_told = bool(lines) and lines[-1].startswith("error: ")
    sys.stderr.writelines(lines[-1:] if is_told else lines)
    return failure.code
