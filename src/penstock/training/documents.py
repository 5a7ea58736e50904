"""The data of a run before it is cut into tokens: files, folders, datasets, or a function."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import OptionError
from penstock.extras import needed_by
from penstock.user_code import errors_in_one_line, load_function

_MOST_BYTES = 4_000_000  # Of Python's library: enough for a demonstration, and quick to read.
_OF_THIS_MACHINE = "_sysconfigdata"  # Files that describe how and where this Python was built.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")

Document: TypeAlias = bytes | tuple[int, ...]
"""A text, as UTF-8; or tokens."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The texts to learn, and where they are from."""

    paths: tuple[str, ...]
    """Empty for Python's own library."""
    parts: tuple[Document, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.paths) or "the source code of Python's library"

    @property
    def num_tokens_at_most(self) -> int:
        """The number of tokens if every byte of a text is one; no tokenizer makes more."""
        return sum(map(len, self.parts))

    @property
    def digest(self) -> str:
        """The hash that identifies the data."""
        found = hashlib.sha256()
        for part in self.parts:
            data = part if isinstance(part, bytes) else repr(part).encode()
            found.update(len(data).to_bytes(8, "big") + data)
        return found.hexdigest()


def read_documents(paths: Sequence[str], *, option: str = "data") -> Documents:
    """Read what `--data` names, or Python's library if it names nothing."""
    if not paths:
        return Documents((), (_read_library(),))
    parts = [part for path in paths for part in _read(path, option)]
    found = Documents(tuple(paths), tuple(parts))
    if not any(found.parts):
        raise OptionError(f"--{option} is {found.name}, which is empty. Give a text to learn.")
    return found


def _read(path: str, option: str) -> Iterator[Document]:
    folder = Path(path)
    if folder.is_dir():
        if any((folder / name).is_file() for name in _OF_DATASETS):
            yield from _read_dataset(path, option)
            return
        files = sorted(folder.rglob("*.txt"))
        if not files:
            raise OptionError(
                f"--{option} is {path}, a folder without .txt files. Expected texts, or a folder "
                "that save_to_disk() of datasets has written."
            )
        yield from (_read_file(str(file), option) for file in files)
    elif not folder.exists() and ":" in path:
        yield from _call(path, option)
    else:
        yield _read_file(path, option)


def _read_file(path: str, option: str) -> bytes:
    if Path(path).exists() and not Path(path).is_file():
        raise OptionError(
            f"--{option} is {path}, which is not a regular file, as every rank could read. "
            "Name a text file, or a folder of them."
        )
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            f"--{option} is {path}, which cannot be read: {error.strerror}. Name a text file, a "
            "folder of .txt files or of datasets, or a function as module:function."
        ) from error


def _read_dataset(path: str, option: str) -> Iterator[Document]:
    """Yield the rows of a dataset that Hugging Face's datasets has saved."""
    with needed_by(f"--{option} {path}", ["datasets"], extra="train", error=OptionError):
        datasets = import_module("datasets")
    with errors_in_one_line(f"--{option} is {path}, which datasets cannot load"):
        found: Any = datasets.load_from_disk(path)
    if hasattr(found, "keys"):  # Several splits.
        if "train" not in found:
            raise OptionError(
                f"--{option} is {path}, which has the splits {', '.join(found)}. Name the folder "
                f"of one of them, such as {Path(path) / next(iter(found))}."
            )
        found = found["train"]
    column = next((name for name in ("text", "input_ids") if name in found.column_names), None)
    if column is None:
        raise OptionError(
            f"--{option} is {path}, whose columns are {', '.join(found.column_names)}. Expected "
            "'text', or 'input_ids' for tokens."
        )
    yield from (_as_document(row, f"{path}, column {column!r}", option) for row in found[column])


def _call(name: str, option: str) -> Iterator[Document]:
    """Yield what a function of the user returns: a text, texts, or tokens."""
    function = load_function(name)
    with errors_in_one_line(f"{name} failed"):
        returned = function()
        if isinstance(returned, str | bytes) or hasattr(returned, "tolist"):
            returned = [returned]
        rows = list(returned)
    if rows and isinstance(rows[0], int):
        rows = [rows]
    yield from (_as_document(row, f"what {name} returns", option) for row in rows)


def _as_document(row: Any, where: str, option: str) -> Document:
    if isinstance(row, str):
        return row.encode()
    if isinstance(row, bytes):
        return row
    values = row.tolist() if hasattr(row, "tolist") else row
    if isinstance(values, list | tuple) and all(isinstance(value, int) for value in values):
        return tuple(values)
    raise OptionError(
        f"--{option}: {where} has a {type(row).__name__}. Expected texts, or lists of tokens, "
        "which are whole numbers."
    )


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
