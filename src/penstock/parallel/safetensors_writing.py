"""Write safetensors files tensor by tensor; only one of them needs to be in host memory."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.comm.abstract_comm import as_bytes
from penstock.errors import PretrainedError
from penstock.parallel.safetensors_folder import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor of a file, by name."""


def num_bytes(forms: Forms) -> int:
    """Return the size of all tensors together."""
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in forms.values())


class SafetensorsWriter:
    """One safetensors file, which is written from its header to its last tensor.

    The format is 8 bytes with the length of the header, the header as JSON, and the tensors one
    after the other, as the header has their places.
    """

    def __init__(self, path: Path, forms: Forms) -> None:
        self._path, self._forms = path, dict(forms)
        self._left = list(self._forms)
        for name, (dtype, _) in self._forms.items():
            if dtype not in _NAMES:
                raise PretrainedError(
                    f"{name!r} has the dtype {dtype}, which {path.name} cannot hold. Expected one "
                    f"of {', '.join(str(known) for known in _NAMES)}: convert it first."
                )
        self._file = path.open("wb")
        self._file.write(_header(self._forms))

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write some tensors, in the order of the forms."""
        for name, tensor in tensors:
            assert name == self._left.pop(0), name
            assert (tensor.dtype, tuple(tensor.shape)) == self._forms[name], name
            own = tensor.detach().cpu().contiguous()
            if own.numel():
                self._file.write(as_bytes(own).numpy().data)

    def close(self, *, is_complete: bool = True) -> None:
        """Close the file; if it is complete, all of its tensors were written."""
        if is_complete:
            assert not self._left, self._left
            self._file.flush()
            os.fsync(self._file.fileno())  # A file that is renamed later must be on the disk.
        self._file.close()


def _header(forms: Forms) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in forms.items():
        end = begin + num_bytes({name: (dtype, shape)})
        described[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin at a multiple of 8, as readers expect.
    return len(text).to_bytes(8, "little") + text
