"""Read checkpoints of torch.distributed.checkpoint without running anything that they name.

torch describes a checkpoint in `.metadata`, by pickle, which can call any function; and it loads
entries that are not tensors with pickle too. Here, the description may only name the few types
that torch writes, entries are tensors, and their files are in the folder of the checkpoint.
"""

import io
import pickle
import pickletools
from pathlib import PurePath
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.errors import CheckpointError

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_NAMED: Final = frozenset(
    {
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
    }
)
"""The types that torch writes into a description; dtypes come on top of them."""


class CheckpointReader(FileSystemReader):
    """A reader of the tensors in a folder; the folder may come from anybody."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the checkpoint; entries other than tensors are left out."""
        path = PurePath(self.path) / ".metadata"
        with self.fs.create_stream(path, "rb") as file:
            try:
                content = file.read()
                _check_memo(content)
                found = _Unpickler(io.BytesIO(content)).load()
                _check(found)
            except CheckpointError:
                raise
            except Exception as error:  # pickle raises nearly any, for bytes of any kind.
                raise CheckpointError(
                    f"{path} is not a description of a checkpoint ({type(error).__name__}: "
                    f"{error}). Expected what torch.distributed.checkpoint wrote: copy it again, "
                    "or load another checkpoint."
                ) from error
        assert isinstance(found, Metadata)
        found.state_dict_metadata = {
            name: entry
            for name, entry in found.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _NAMED:
            return super().find_class(module, name)
        raise CheckpointError(
            f"the description of the checkpoint names {module}.{name}, which torch does not write "
            "there and which may run anything. Expected only tensors: do not load this folder "
            "with other programs either, unless you trust it."
        )


def _check_memo(content: bytes) -> None:
    """Raise an error for a number in the memo that would make pickle take gigabytes for it."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) >= len(content):
            raise ValueError(f"{argument} is too large for a number in the memo")


def _check(found: Any) -> None:
    """Raise an error unless all entries are of the types that torch writes."""
    _expect(found, Metadata)
    for name, entry in found.state_dict_metadata.items():
        _expect(name, str)
        if isinstance(entry, TensorStorageMetadata):
            _expect(entry.properties, TensorProperties)
            _expect(entry.properties.dtype, torch.dtype)
            _expect(entry.size, torch.Size)
            for chunk in entry.chunks:
                _expect(chunk, ChunkStorageMetadata)
                _expect(chunk.offsets, torch.Size)
                _expect(chunk.sizes, torch.Size)
    for index, stored in found.storage_data.items():
        _expect(index, MetadataIndex)
        _expect(stored.relative_path, str)
        if PurePath(stored.relative_path).name != stored.relative_path:
            raise ValueError(f"{stored.relative_path!r} is outside of the folder")
        if min(stored.offset, stored.length) < 0 or getattr(stored, "transform_descriptors", None):
            raise ValueError(f"{stored} is not a part of a file")


def _expect(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} is in place of a {kind.__name__}")
