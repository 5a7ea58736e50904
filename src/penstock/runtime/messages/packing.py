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


class _Part(NamedTuple):
    """A tensor of a message: its number there, its shape and dtype, and its place in a buffer."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]
    start: int
    """Where it begins, in elements of its own."""


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
        # The largest elements first: each tensor then begins at a multiple of its element's size.
        for number in sorted(range(len(kinds)), key=lambda number: -kinds[number][1].itemsize):
            shape, dtype = kinds[number]
            strides = torch.empty(size=shape, device="meta").stride()
            num_bytes = shape.numel() * dtype.itemsize
            is_small = num_bytes <= SMALL_BYTES
            part = _Part(number, shape, dtype, strides, end // dtype.itemsize if is_small else 0)
            (packed if is_small else others).append(part)
            end += num_bytes if is_small else 0
        return cls(tuple(packed), tuple(others), end) if len(packed) > 1 else None

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what to send for the tensors of a message: a buffer, then the others."""
        buffer = torch.cat([as_bytes(tensors[part.number]) for part in self.packed])
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
            tensor.set_(buffer.untyped_storage(), part.start, part.shape, part.strides)
            whole[part.number] = tensor
        return [whole[number] for number in range(len(whole))]
