"""Processes that run a command as one of its ranks, and can do so again after another rank's end.

    launcher ──stdin: one line of JSON per command──▶ process
             ◀──"stopped": another rank failed─────── waits for its next command
             ◀──exit code──────────────────────────── done, or failed itself

A process that waits has loaded torch, which takes seconds: it is a spare, or a survivor.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.ir import Rank

_LOOK_S = 0.05
_GRACE_S = 5.0  # The time for ranks to end by themselves when they are asked to.
STOPPED_BY_ANOTHER = 3
"""The exit code of a rank that failed only because another one did."""


class Failure(NamedTuple):
    """The end of a rank that failed."""

    rank: Rank
    pid: int
    code: int
    """The exit code; negative if a signal ended it, as in subprocess."""
    errors: Path
    """The file with its standard error."""

    def describe(self) -> str:
        """Return how the rank ended, in a part of a sentence."""
        if self.code < 0:
            return (
                f"rank {self.rank} (process {self.pid}) was ended by "
                f"{signal.Signals(-self.code).name}"
            )
        lines = self.errors.read_text(errors="replace").splitlines() or ["without a word"]
        said = lines[-1].removeprefix("error: ").removesuffix(".")
        return f"rank {self.rank} (process {self.pid}) failed: {said}"

    @property
    def is_own(self) -> bool:
        """True unless the rank was stopped by another's failure, or by its launcher."""
        return self.code not in (0, STOPPED_BY_ANOTHER, -signal.SIGTERM)

    @property
    def is_told(self) -> bool:
        """True if the rank ended with an error of Penstock's, which it would meet again."""
        lines = self.errors.read_text(errors="replace").splitlines()
        return self.code == 1 and bool(lines) and lines[-1].startswith("error: ")


class RankProcess:
    """A process that waits for a command, or runs one."""

    def __init__(self, program: str, errors: Path) -> None:
        self.errors = errors
        """The file with its standard error."""
        self._is_stopped = False
        self._replies, theirs = os.pipe()
        os.set_blocking(self._replies, False)
        # Windows cannot hand over a pipe: a process there ends with its command.
        passed = () if sys.platform == "win32" else (theirs,)
        with errors.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, *map(str, passed)],
                stdin=subprocess.PIPE,
                stderr=stream,
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C reaches the launcher alone.
            )
        os.close(theirs)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command in an environment; errors of earlier commands are forgotten."""
        os.truncate(self.errors, 0)
        self._is_stopped = False
        line = json.dumps({"arguments": list(arguments), "environment": dict(environment)})
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # If it has ended, `code` says so.
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def code(self) -> int | None:
        """Return how the command ended, or None if it runs."""
        if (code := self._process.poll()) is not None:
            return code
        with suppress(BlockingIOError):
            self._is_stopped = self._is_stopped or bool(os.read(self._replies, 64))
        return STOPPED_BY_ANOTHER if self._is_stopped else None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # A command that it never read.
            self._process.stdin.close()
        os.close(self._replies)


class RankProcesses:
    """The processes of a launcher: those of the ranks, and spares."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder
        self._all: list[RankProcess] = []
        self._num_started = 0

    def prepare(self, num_processes: int) -> None:
        """Start the processes that are missing."""
        while len(self._all) < num_processes:
            self._num_started += 1
            errors = self._folder / f"stderr {self._num_started}"
            self._all.append(RankProcess(self._program, errors))

    def run(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> list[Failure]:
        """Run a command on as many ranks as there are environments; return the failures.

        When a rank fails, the others have some seconds to notice it and to stop.
        """
        ranks = self._all[: len(environments)]
        for process, environment in zip(ranks, environments, strict=True):
            process.run(arguments, environment)
        until_s = float("inf")
        while None in (codes := [each.code() for each in ranks]) and time.monotonic() < until_s:
            if any(codes):
                until_s = min(until_s, time.monotonic() + _GRACE_S)
            time.sleep(_LOOK_S)
        return [
            Failure(Rank(rank), process.pid, code, process.errors)
            for rank, (process, code) in enumerate(zip(ranks, codes, strict=True))
            if code
        ]

    def errors_of_first(self) -> str:
        """Return the standard error of rank 0."""
        return self._all[0].errors.read_text(errors="replace")

    def sort_out(self, num_ranks: int, *, may_go_on: bool) -> None:
        """End the processes that cannot run another command, after a failure on these ranks.

        Without `may_go_on`, these are all that have run one.
        """
        kept = []
        for number, process in enumerate(self._all):
            code = process.code()
            was_stopped = may_go_on and code == STOPPED_BY_ANOTHER
            is_free = was_stopped if number < num_ranks else code is None
            if is_free and process.is_alive:
                kept.append(process)
            else:
                process.close()
        self._all = kept

    def close(self) -> None:
        """End all processes: they are asked first, and killed after some seconds."""
        for process in self._all:
            process.terminate()
        until_s = time.monotonic() + _GRACE_S
        while any(each.is_alive for each in self._all) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        for process in self._all:
            process.close()
        self._all = []
