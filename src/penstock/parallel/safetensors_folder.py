"""The safetensors files of a folder: which tensors they hold, read one at a time."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.comm.abstract_comm import as_bytes
from penstock.errors import PretrainedError
from penstock.extras import needed_by

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes of tensors, by their names in safetensors files."""
_VALUES_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, which was not read."""

    file: Path
    version: tuple[int, int]
    """The length of the file and when it was changed, as its header was read."""
    begin: int
    """The place of the tensor in the file."""
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def on_meta(self) -> Tensor:
        """Return a tensor of this form, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The tensors in the safetensors files of a folder, by their names in these files."""

    folder: Path
    entries: dict[str, Entry]

    @classmethod
    def of(cls, folder: Path, name: str = "model.safetensors") -> "SafetensorsFolder":
        """Read the headers of the file `name`, or of those that its index lists; no tensor."""
        single, index = folder / name, folder / f"{name}.index.json"
        if single.is_file():
            return cls(folder, _entries(single))
        if not index.is_file():
            raise PretrainedError(
                f"{folder} has neither {name} nor {index.name}, but {_listing(folder)}. Expected "
                "weights in the safetensors format: convert others with transformers, by "
                "from_pretrained(…) and save_pretrained(…)."
            )
        entries: dict[str, Entry] = {}
        listed = _read_index(index)
        for file in dict.fromkeys(listed.values()):
            path = folder / file
            if not os.path.isfile(path):  # Also for names that no file can have.
                raise PretrainedError(
                    f"{index} lists the file {file!r}, which {folder} lacks. Expected all files "
                    "of the index: copy or download the folder again."
                )
            entries |= _entries(path)
        for tensor, file in listed.items():
            if tensor not in entries or entries[tensor].file.name != file:
                raise PretrainedError(
                    f"{index} says that {tensor!r} is in {file!r}, but it is not. Expected an "
                    "index of these files: copy or download the folder again."
                )
        return cls(folder, {tensor: entries[tensor] for tensor in listed})

    @contextmanager
    def reading(self) -> "Iterator[TensorReader]":
        """Return a reader of single tensors; its files are closed at the end of the context."""
        with ExitStack() as stack:
            yield TensorReader(self.entries, stack)


class TensorReader:
    """Reads tensors from open files, each into memory of its own.

    It reads the bytes itself: safetensors would map files, whose pages count as resident, or read
    a whole tensor to return a part of it.
    """

    def __init__(self, entries: dict[str, Entry], stack: ExitStack) -> None:
        self._entries, self._stack = entries, stack
        self._open: dict[Path, FileIO] = {}
        self._memory: dict[torch.dtype, Tensor] = {}
        """Where values are read that are converted; one piece, so that memory stays in one."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one tensor, in host memory, converted in parts if it has another dtype."""
        entry = self._entries[name]
        found = torch.empty(entry.shape, dtype=dtype or entry.dtype)
        if found.dtype == entry.dtype:
            self._read_into(found.view(-1), entry, 0)
            return found
        flat, begin = found.view(-1), 0
        if entry.dtype not in self._memory:
            self._memory[entry.dtype] = torch.empty(_VALUES_AT_ONCE, dtype=entry.dtype)
        for part in self.parts(name, self._memory[entry.dtype]):
            flat[begin : begin + len(part)] = part
            begin += len(part)
        return found

    def parts(self, name: str, memory: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the values of a tensor a few megabytes at a time; each time in the same memory."""
        entry = self._entries[name]
        num_values = math.prod(entry.shape)
        if memory is None:
            memory = torch.empty(min(num_values, _VALUES_AT_ONCE), dtype=entry.dtype)
        for begin in range(0, num_values, _VALUES_AT_ONCE):
            part = memory[: num_values - begin]
            self._read_into(part, entry, begin)
            yield part

    def _read_into(self, part: Tensor, entry: Entry, begin: int) -> None:
        """Read the values of a tensor from the `begin`th on into a part of it."""
        if not part.numel():
            return
        try:
            file = self._open.get(entry.file)
            if file is None:
                file = self._stack.enter_context(entry.file.open("rb", buffering=0))
                self._open[entry.file] = file
            if _version(os.fstat(file.fileno())) != entry.version:
                raise _changed(entry)
            file.seek(entry.begin + begin * entry.dtype.itemsize)
            wanted = memoryview(as_bytes(part).numpy().data).cast("B")
            while wanted:
                num_read = file.readinto(wanted)
                if not num_read:
                    raise _changed(entry)
                wanted = wanted[num_read:]
        except OSError as exc:
            raise _changed(entry) from exc


def _changed(entry: Entry) -> PretrainedError:
    return PretrainedError(
        f"{entry.name!r} cannot be read from {entry.file} as its header described it. "
        "Expected files that stay as they are from load_pretrained() until the stages are built."
    )


def _entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file, by its header; the file has the length that this says."""
    try:
        with _safetensors().safe_open(path, framework="pt", device="cpu"):
            pass  # It is complete, and its header is right.
        with path.open("rb") as file:
            version = _version(os.fstat(file.fileno()))
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError, _safetensors().SafetensorError) as exc:
        raise PretrainedError(
            f"{path} is not a complete safetensors file ({exc}). Expected one: copy or download "
            "it again, or convert the weights with transformers, by from_pretrained(…) and "
            "save_pretrained(…)."
        ) from exc
    header.pop("__metadata__", None)
    entries = {}
    for name, described in header.items():
        dtype = DTYPES.get(described["dtype"])
        if dtype is None:
            raise PretrainedError(
                f"{name!r} in {path} has the dtype {described['dtype']}. Expected one of "
                f"{', '.join(DTYPES)}: convert the weights with transformers first."
            )
        begin = 8 + length + described["data_offsets"][0]
        entries[name] = Entry(path, version, begin, name, dtype, tuple(described["shape"]))
    return entries


def _version(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    try:
        listed = json.loads(index.read_text())["weight_map"]
        is_right = all(Path(file).name == file for file in listed.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise PretrainedError(
            f"{index} is not an index of weights ({type(exc).__name__}: {exc}). Expected JSON with "
            "a 'weight_map' from names of tensors to files: copy or download the folder again."
        ) from exc
    if not is_right:
        raise PretrainedError(
            f"{index} names files outside of its folder. Expected names of files beside it, "
            "without a path."
        )
    return dict(listed)


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"


def _safetensors() -> Any:
    with needed_by(
        "A folder of weights", ["safetensors", "transformers"], extra="hf", error=PretrainedError
    ):
        return import_module("safetensors")
