"""Runs command lines: most in this process, which is quick, and some as a process of their own."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from limits import PROCESS_S
from penstock.cli import main

PROGRAM = Path(sys.executable).with_name("penstock")


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What a command that went well printed."""
        assert (0, "") == (self.code, self.err)
        return self.out.splitlines()

    @property
    def error(self) -> str:
        """What a command that failed said, which must be one line."""
        assert self.code in (1, 2)
        [line] = self.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


def run(*args: object, stdin: str = "") -> Ran:
    """`penstock ARGS` in this process, as if its output went into files."""
    out, err = io.StringIO(), io.StringIO()
    piped = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "stdin", piped),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exited,
    ):
        main([str(arg) for arg in args])
    code = exited.value.code
    assert code is None or isinstance(code, int)
    return Ran(code or 0, out.getvalue(), err.getvalue())


def run_process(
    *args: object, stdin: str = "", folder: Path | None = None, program: Sequence[object] = ()
) -> Ran:
    """`penstock ARGS` as it is installed."""
    command = [*map(str, program or [PROGRAM]), *map(str, args)]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=folder,
        env=environment,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)
