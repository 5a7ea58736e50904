"""Arguments that carry a batch and are not tensors: which they are, and how masks are cut.

torch's pytree takes tuples, lists, dicts and registered classes apart. Of the rest, a `BlockMask`
of flex_attention can be cut by its batch; any other object that holds a batch cannot.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

import penstock.torch_version  # noqa: F401 (warns)

_FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_DEVICE_MESH = "torch.distributed.device_mesh"
_SIMPLE_TYPES = str | bytes | int | float | complex | bool | None
_MAX_OBJECTS = 10_000
"""How many to look into: a cache of a large model has some hundred."""
_MAX_DEPTH = 6
"""How far to look into objects within objects: a cache of layers of tensors is four deep."""


def is_block_mask(value: Any) -> bool:
    """Whether this is a mask of flex_attention; does not load what the user has not."""
    flex_attention = sys.modules.get(_FLEX_ATTENTION)
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def is_one_leaf(value: Any) -> bool:
    """Whether this must not be taken apart, though pytree may know how to."""
    return isinstance(value, PackedSequence) or is_block_mask(value)


def batch_of_mask(mask: Any) -> int:
    """The size of a mask's batch; 1 if it has none, as it then holds for every row."""
    blocks: Tensor = mask.kv_num_blocks
    return blocks.shape[0] if blocks.dim() > 2 else 1


def cut_mask(mask: Any, num_microbatches: int) -> list[Any]:
    """The mask of each microbatch, cut as tensors are; raises ValueError if it cannot be cut.

    `mask_mod` is asked about rows of the whole batch, so each piece adds its first row.
    """
    batch = batch_of_mask(mask)
    pieces = [copy.copy(mask) for _ in range(num_microbatches)]
    for name, value in vars(mask).items():
        if not isinstance(value, Tensor):
            continue
        if name.startswith("dq_"):  # torch does not cut these orders either.
            raise ValueError(f"it has a {name}")
        if value.shape[0] != batch:
            raise ValueError(f"its {name} has {value.shape[0]} rows, but its batch is {batch}")
        for piece, part in zip(pieces, value.tensor_split(num_microbatches), strict=True):
            setattr(piece, name, part)
    first_row = 0
    for piece in pieces:
        piece.mask_mod = _shifted(mask.mask_mod, first_row)
        first_row += batch_of_mask(piece)
    return pieces


def _shifted(mask_mod: Callable[..., Any], first_row: int) -> Callable[..., Any]:
    def shifted_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + first_row, h, q_idx, kv_idx)

    return shifted_mask_mod


def holds_batch(value: Any, batches: Collection[int]) -> bool:
    """Whether an object that cannot be taken apart holds a tensor with a batch.

    `batches` has the sizes of the batch that are known; without any, each tensor with several
    rows counts. Callables and modules are taken for what computes, not for what is computed with.
    """
    if isinstance(value, PackedSequence):
        return True
    for tensor in _tensors_within(value, set(), _MAX_DEPTH):
        sizes = () if tensor.is_nested or tensor.dim() == 0 else tensor.shape
        if tensor.is_nested or (batches and any(size in batches for size in sizes)):
            return True
        if not batches and sizes and sizes[0] > 1:
            return True
    return False


def hides_gradient(value: Any) -> bool:
    """Return whether an object that cannot be taken apart holds a tensor that needs a gradient."""
    if isinstance(value, _SIMPLE_TYPES):
        return False
    return any(tensor.requires_grad for tensor in _tensors_within(value, set(), _MAX_DEPTH))


def _tensors_within(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
        return
    if isinstance(value, _SIMPLE_TYPES | ModuleType) or depth == 0 or id(value) in seen:
        return
    if callable(value) or len(seen) >= _MAX_OBJECTS:
        return
    mesh = sys.modules.get(_DEVICE_MESH)
    if isinstance(value, Optimizer) or (mesh is not None and isinstance(value, mesh.DeviceMesh)):
        return
    seen.add(id(value))
    try:
        parts = list(islice(_parts_of(value), _MAX_OBJECTS))
    except Exception:  # It does not let itself be looked into, and is taken for harmless.
        return
    for part in parts:
        yield from _tensors_within(part, seen, depth - 1)


def _parts_of(value: Any) -> Iterator[Any]:
    """What an object holds: items, fields, attributes and slots."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    if is_dataclass(value):
        yield from (getattr(value, field.name, None) for field in fields(value))
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield getattr(value, name, None)
