"""Find tensors with a batch or a gradient inside objects that torch cannot take apart."""

import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

_DEVICE_MESH = "torch.distributed.device_mesh"
_SIMPLE_TYPES = str | bytes | int | float | complex | bool | None
_MAX_OBJECTS = 10_000
"""The most objects to look into; the cache of a large model has a few hundred."""
_MAX_DEPTH = 6
"""The depth of nested objects to look into; a cache of layers of tensors is four deep."""


def holds_batch(value: Any, batches: Collection[int]) -> bool:
    """Return whether an object that cannot be taken apart holds a tensor with a batch.

    `batches` has the known sizes of the batch; if it is empty, each tensor with several rows
    counts. Callables and modules are ignored: they compute, and are not data.
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
    except Exception:  # Objects that cannot be looked into are taken to hold no tensors.
        return
    for part in parts:
        yield from _tensors_within(part, seen, depth - 1)


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield what an object holds: items, fields, attributes and slots."""
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
