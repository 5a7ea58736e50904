"""Specs: the dim along which an argument is cut into microbatches, or that it stays whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.microbatches.nested_values import in_words, parts_of, require
from penstock.torch_private import pytree


@dataclass(frozen=True, slots=True, repr=False)
class TensorChunkSpec:
    """A spec that cuts a tensor, or every tensor in a nested value, along `split_dim`."""

    split_dim: int

    def __post_init__(self) -> None:
        is_int = isinstance(self.split_dim, int)
        require(is_int, "split_dim", self.split_dim, "an int, or Replicate() for a whole value")

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the specs for a tuple of dims, which may nest tuples, lists and dicts.

        >>> TensorChunkSpec.from_tuple((0, [1, None]))
        (TensorChunkSpec(0), [TensorChunkSpec(1), None])
        """
        return tuple(pytree.tree_map(_as_spec, chunk_dims))

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Return the specs for a dict of dims, which may nest tuples, lists and dicts.

        >>> TensorChunkSpec.from_dict({"id": 0, "mask": 1})
        {'id': TensorChunkSpec(0), 'mask': TensorChunkSpec(1)}
        """
        return dict(pytree.tree_map(_as_spec, chunk_dims))


@dataclass(frozen=True, slots=True)
class Replicate:
    """A spec that gives a whole value to every microbatch; None in a spec does the same.

    >>> import torch, penstock
    >>> x, specs = torch.arange(4), (TensorChunkSpec(0), Replicate())
    >>> penstock.split_args_kwargs_into_chunks((x, x), None, 2, specs)[0][1]
    (tensor([2, 3]), tensor([0, 1, 2, 3]))
    """


@dataclass(frozen=True, slots=True)
class Reducer:
    """A spec that joins outputs by a function: reduce_fn(reduce_fn(init_value, first), second) …

    >>> import penstock
    >>> penstock.merge_chunks([(1.5, "a"), (2.0, "b")], (Reducer(0.0, max), None))
    (2.0, 'a')
    """

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


Spec = TensorChunkSpec | Replicate | Reducer | None


def find_specs(spec: Any, value: Any, name: str, spec_name: str) -> Iterator[Spec]:
    """Yield the spec of each leaf of `value`, in the order in which it is flattened."""
    parts, spec_parts = parts_of(value), parts_of(spec)
    if isinstance(spec, Spec) and parts is None:
        if isinstance(spec, TensorChunkSpec) and isinstance(value, Tensor):
            has_dim = -value.dim() <= spec.split_dim < value.dim()
            wanted = f"a tensor with the dim of {spec}, or Replicate() for it in {spec_name}"
            require(has_dim, name, value, wanted)
        yield spec
        return
    if isinstance(spec, Spec) and parts is not None:
        spec_parts = dict.fromkeys(parts, spec)
    if parts is None or spec_parts is None or parts.keys() != spec_parts.keys():
        raise MicrobatchError(
            f"{spec_name} does not mirror {name}, which is {in_words(value)}: there it holds "
            f"{in_words(spec)}. Expected TensorChunkSpec(dim) to cut it, Replicate() or None to "
            "pass it whole, or specs nested like it; TensorChunkSpec.from_tuple makes specs from "
            "ints."
        )
    for key, part in parts.items():
        yield from find_specs(spec_parts[key], part, f"{name}{key}", spec_name)


def _as_spec(dim: Any) -> Spec:
    return dim if isinstance(dim, Spec) else TensorChunkSpec(dim)
