"""The text to learn: the bytes of a file, or the source code of Python's own library."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import OptionError

_MOST_BYTES = 4_000_000  # Of Python's library: enough for a demonstration, and quick to read.
_OF_THIS_MACHINE = "_sysconfigdata"  # Files that describe how and where this Python was built.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes of a text, and the path they are from."""

    path: str
    """Empty for Python's own library."""
    data: bytes

    @property
    def name(self) -> str:
        return self.path or "the source code of Python's library"

    @property
    def digest(self) -> str:
        """The hash that identifies the text."""
        return hashlib.sha256(self.data).hexdigest()


def read_text(path: str, *, context: int) -> Text:
    """Read a file, or Python's library if `path` is empty; raise an error if it is too short."""
    text = Text(path, _read_file(path) if path else _read_library())
    if len(text.data) <= context:
        raise OptionError(
            f"the text {text.name} has {len(text.data)} bytes. Expected at least {context + 1}, "
            f"because --context is {context}: give a longer --text, or a smaller --context."
        )
    return text


def _read_file(path: str) -> bytes:
    if Path(path).exists() and not Path(path).is_file():
        raise OptionError(
            f"the text {path} is not a regular file, which every rank could read. "
            "Set --text to a file."
        )
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            f"the text {path} cannot be read: {error.strerror}. Set --text to a file."
        ) from error


def _read_library() -> bytes:
    """Return bytes of Python's library: the same wherever the same Python is installed."""
    data = bytearray()
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(_OF_THIS_MACHINE):
                data += Path(folder, name).read_bytes()
        if len(data) >= _MOST_BYTES:
            break
    return bytes(data[:_MOST_BYTES])
