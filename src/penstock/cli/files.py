"""Files that commands read and write; `-` is standard input or output."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import OptionError

PIPE = "-"


def read_text(path: str) -> str:
    """Read a text file, or standard input."""
    where = "Standard input" if path == PIPE else path
    try:
        raw = sys.stdin.buffer.read() if path == PIPE else Path(path).read_bytes()
    except OSError as exc:
        raise OptionError(f"{where} cannot be read: {exc.strerror}.") from exc
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise OptionError(
            f"{where} is not valid UTF-8 (byte {exc.start}). Expected a text file."
        ) from exc


def check_output(path: str | None, *, option: str = "--output", inputs: Iterable[str] = ()) -> None:
    """Raise an error if `path` cannot be written, before the work is done."""
    if path is None or path == PIPE:
        return
    target = Path(path)
    for name in inputs:
        if name != PIPE and target.exists() and Path(name).exists() and target.samefile(name):
            raise OptionError(f"{option} is {path}, which is also an input. Give another file.")
    if target.is_dir():
        raise OptionError(f"{option} is {path}, which is a folder. Give a file.")
    if not target.parent.is_dir():
        raise OptionError(
            f"{option} is {path}, but there is no folder {target.parent}. Make it first."
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise OptionError(f"{option} is {path}, which cannot be written. Give another file.")


def write_text(path: str | None, text: str) -> None:
    """Write a file, or standard output if none is given."""
    if path is None or path == PIPE:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise OptionError(f"{path} cannot be written: {exc.strerror}.") from exc
