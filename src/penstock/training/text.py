"""What is learned: the bytes of a text file, or the source code of Python's own library."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import OptionError

_MOST_BYTES = 4_000_000  # Of Python's library: enough for a demonstration, read in an instant.
_OF_THIS_MACHINE = "_sysconfigdata"  # How this Python was built, and where.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes, and where they are from."""

    path: str
    """Empty for Python's own library."""
    data: bytes

    @property
    def name(self) -> str:
        return self.path or "the source code of Python's library"

    @property
    def digest(self) -> str:
        """Tells texts apart."""
        return hashlib.sha256(self.data).hexdigest()


def read_text(path: str, *, context: int) -> Text:
    """The text in a file, or Python's if `path` is empty; long enough for one sequence."""
    text = Text(path, _read_file(path) if path else _read_library())
    if len(text.data) <= context:
        raise OptionError(
            f"the text {text.name} has {len(text.data)} bytes. Expected at least {context + 1}, "
            f"as --context is {context}: give a longer --text, or a smaller --context."
        )
    return text


def _read_file(path: str) -> bytes:
    if Path(path).exists() and not Path(path).is_file():
        raise OptionError(
            f"the text {path} is no file that every rank can read for itself. Let --text name one."
        )
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            f"the text {path} cannot be read: {error.strerror}. Let --text name a file."
        ) from error


def _read_library() -> bytes:
    """The same bytes wherever the same Python is installed."""
    data = bytearray()
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(_OF_THIS_MACHINE):
                data += Path(folder, name).read_bytes()
        if len(data) >= _MOST_BYTES:
            break
    return bytes(data[:_MOST_BYTES])
