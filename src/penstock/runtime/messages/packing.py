"""Small tensors of one message, packed into one buffer.

Over gloo a transfer takes two wake-ups of a thread, whatever its size. A message of several small
tensors is therefore copied into one buffer, which takes less than a second transfer. Large tensors
travel by themselves: there the copy would take longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.comm.abstract_comm import as_bytes

# A wake-up takes about 10 microseconds, and copying 64 KiB about as long at 6 GB/s.
SMALL_BYTES = 64 * 1024
# As torch aligns its own tensors: products of others may round differently.
_ALIGNMENT = 64


class _Part(NamedTuple):
    """A tensor of a message: its number there, its shape and dtype, and its bytes in a buffer."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The small tensors of a message, by their places in a buffer, and the others."""

    packed: tuple[_Part, ...]
    others: tuple[_Part, ...]
    num_bytes: int

    @classmethod
    def of(cls, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> "Packing | None":
        """Return the packing of tensors of these shapes and dtypes; None if it saves nothing."""
        packed: list[_Part] = []
        others: list[_Part] = []
        end = 0
        for number, (shape, dtype) in enumerate(kinds):
            strides = torch.empty(size=shape, device="meta").stride()
            num_bytes = shape.numel() * dtype.itemsize
            if num_bytes <= SMALL_BYTES:
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                end = start + num_bytes
                packed.append(_Part(number, shape, dtype, strides, start, end))
            else:
                others.append(_Part(number, shape, dtype, strides, 0, num_bytes))
        return cls(tuple(packed), tuple(others), end) if len(packed) > 1 else None

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what to send for the tensors of a message: a buffer, then the others."""
        first = tensors[self.packed[0].number]
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=first.device)
        for part in self.packed:
            buffer[part.start : part.end] = as_bytes(tensors[part.number])
        return [buffer, *(tensors[part.number] for part in self.others)]

    def empties(self, device: torch.device) -> list[Tensor]:
        """Return tensors in which to receive what `pack` returns."""
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        others = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in self.others)
        return [buffer, *others]

    def unpack(self, received: Sequence[Tensor]) -> list[Tensor]:
        """Undo `pack`, before or after the values arrive: tensors share the buffer's memory."""
        buffer = received[0]
        whole = {part.number: x for part, x in zip(self.others, received[1:], strict=True)}
        for part in self.packed:
            # Not a view: that would share the count of its changes in place with the others.
            tensor = torch.empty(0, dtype=part.dtype, device=buffer.device)
            start = part.start // part.dtype.itemsize
            tensor.set_(buffer.untyped_storage(), start, part.shape, part.strides)
            whole[part.number] = tensor
        return [whole[number] for number in range(len(whole))]
