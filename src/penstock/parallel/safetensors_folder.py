"""The safetensors files of a folder: which tensors they hold, read one at a time."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, which was not read."""

    file: Path
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
            if not path.is_file():
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
    """Reads tensors from open files, each into memory of its own."""

    def __init__(self, entries: dict[str, Entry], stack: ExitStack) -> None:
        self._entries, self._stack = entries, stack
        self._open: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """Return one tensor, in host memory."""
        entry = self._entries[name]
        found: Tensor = self._from_file(entry, lambda file: file.get_tensor(entry.name))
        if (found.dtype, tuple(found.shape)) != (entry.dtype, entry.shape):
            raise _changed(entry)
        return found

    def parts(self, name: str, num_rows: int) -> Iterator[Tensor]:
        """Return a tensor in parts, cut along its first dimension."""
        entry = self._entries[name]
        if not entry.shape:
            yield self.read(name)
            return
        part = self._from_file(entry, lambda file: file.get_slice(entry.name))
        for begin in range(0, entry.shape[0], num_rows):
            yield part[begin : min(begin + num_rows, entry.shape[0])]

    def _from_file(self, entry: Entry, get: Callable[[Any], Any]) -> Any:
        try:
            if entry.file not in self._open:
                self._open[entry.file] = self._stack.enter_context(_safe_open(entry.file))
            return get(self._open[entry.file])
        except (OSError, _safetensor_error()) as exc:
            raise _changed(entry) from exc


def _changed(entry: Entry) -> PretrainedError:
    return PretrainedError(
        f"{entry.name!r} cannot be read from {entry.file} as its header described it. "
        "Expected files that stay as they are from load_pretrained() until the stages are built."
    )


def _entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file, by its header; the file has the length that this says."""
    try:
        with _safe_open(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (OSError, _safetensor_error()) as exc:
        raise PretrainedError(
            f"{path} is not a complete safetensors file ({exc}). Expected one: copy or download "
            "it again, or convert the weights with transformers, by from_pretrained(…) and "
            "save_pretrained(…)."
        ) from exc
    for name, (dtype, _) in found.items():
        if dtype not in DTYPES:
            raise PretrainedError(
                f"{name!r} in {path} has the dtype {dtype}. Expected one of {', '.join(DTYPES)}: "
                "convert the weights with transformers first."
            )
    return {name: Entry(path, name, DTYPES[dtype], shape) for name, (dtype, shape) in found.items()}


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    try:
        listed = json.loads(index.read_text())["weight_map"]
        is_right = all(Path(file).name == file for file in listed.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
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


def _safetensor_error() -> Any:
    return _safetensors().SafetensorError


def _safe_open(path: Path) -> Any:
    # Read, not mapped: pages of a mapped file would count as resident as long as it is open.
    return _safetensors().safe_open(path, framework="pt", device="cpu", backend="pread")
