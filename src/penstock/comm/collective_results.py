"""Tensors that a collective is still filling, as the layers of tensor parallelism return them.

`RowwiseParallel` and its like return an `AsyncCollectiveTensor`, which waits at its first use in
an operation of torch. It has no memory of its own, so code that reads memory must wait for it.
"""

from typing import TypeVar, cast

from torch import Tensor

from penstock.backward.settling import PLAIN_TYPES
from penstock.torch_private import async_collective_tensor

Value = TypeVar("Value")


def waited(value: Value) -> Value:
    """Wait for a tensor that a collective is filling; return anything else as it is."""
    if type(value) in PLAIN_TYPES or not isinstance(value, Tensor):
        return value
    # Looked up late: it takes a while to load, and a program with such a tensor has loaded it.
    return cast(Value, value.wait()) if isinstance(value, async_collective_tensor()) else value


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, after waiting for its collective if it has one."""
    return waited(tensor.detach())
