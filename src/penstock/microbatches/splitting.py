"""Cut the arguments of a step into microbatches.

The names and parameters are those of torch.distributed.pipelining.microbatch, so scripts keep
working. One thing differs on purpose: the number of microbatches is always the one requested.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import MicrobatchError
from penstock.microbatches.chunk_specs import Reducer, Spec, TensorChunkSpec, find_specs
from penstock.microbatches.hidden_tensors import holds_batch
from penstock.microbatches.masks import batch_of_mask, cut_mask, is_block_mask, is_one_leaf
from penstock.microbatches.nested_values import leaf_names, require
from penstock.torch_private import REGISTER_PYTREE_NODE, pytree


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the args and kwargs of each of `chunks` microbatches, as views of the tensors given.

    Tensors are cut along dim 0 as by torch.tensor_split, so sizes may differ by one. Tensors
    without dims and other values go whole to every microbatch, except that a BlockMask is cut
    along its batch. Objects that hold a batch are refused. A spec changes this: it mirrors the
    nesting of the args, and one TensorChunkSpec, Replicate or None in it applies to everything
    nested there. Without args (or kwargs) their spec is ignored.

    >>> import torch
    >>> args, kwargs = split_args_kwargs_into_chunks((torch.arange(5),), {"scale": 2.0}, 2)
    >>> args
    [(tensor([0, 1, 2]),), (tensor([3, 4]),)]
    >>> kwargs
    [{'scale': 2.0}, {'scale': 2.0}]
    """
    are_args, are_kwargs = isinstance(args, tuple | list), isinstance(kwargs, dict | None)
    require(are_args, "args", args, "a tuple; for a single argument, write (argument,)")
    require(are_kwargs, "kwargs", kwargs, "a dict, or None if there are no keyword arguments")
    _require_count("chunks", chunks)
    if not args and not kwargs:  # As on every rank but the first, in most pipelines.
        return [()] * chunks, [{} for _ in range(chunks)]
    first, second = _split(
        _Whole.of(tuple(args), "args", args_chunk_spec, "args_chunk_spec"),
        _Whole.of(dict(kwargs or {}), "kwargs", kwargs_chunk_spec, "kwargs_chunk_spec"),
        num_microbatches=chunks,
    )
    return first, second


def batch_size(
    args: tuple[Any, ...], kwargs: dict[str, Any], args_chunk_spec: Any, kwargs_chunk_spec: Any
) -> int | None:
    """Return the size of a batch along the dim in which it is cut; None if nothing is.

    >>> import torch
    >>> batch_size((torch.zeros(7, 8),), {}, TensorChunkSpec(1), None)
    8
    """
    wholes = (
        _Whole.of(args, "args", args_chunk_spec, "args_chunk_spec"),
        _Whole.of(kwargs, "kwargs", kwargs_chunk_spec, "kwargs_chunk_spec"),
    )
    return next((size for whole in wholes for _, size in whole.batches()), None)


def split_target(target: Any, num_microbatches: int) -> list[Any]:
    """Return the target of each microbatch, cut like arguments without a spec.

    >>> import torch
    >>> split_target({"label": torch.arange(4)}, 2)
    [{'label': tensor([0, 1])}, {'label': tensor([2, 3])}]
    """
    _require_count("num_microbatches", num_microbatches)
    return _split(_Whole.of(target, "target", None, ""), num_microbatches=num_microbatches)[0]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A value to be cut: its leaves, and the spec of each."""

    value: Any
    name: str
    spec_name: str
    leaves: list[Any]
    specs: list[Spec]
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any, name: str, spec: Any, spec_name: str) -> "_Whole":
        leaves, tree = pytree.tree_flatten(value, is_one_leaf)
        specs: list[Spec] = [TensorChunkSpec(0)] * len(leaves)
        if spec is not None and leaves:  # All ranks have the specs, but not all get arguments.
            specs = list(find_specs(spec, value, name, spec_name))
        return cls(value, name, spec_name, leaves, specs, tree)

    def leaf_name(self, number: int) -> str:
        return f"{self.name}{leaf_names(self.value)[number]}"

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each leaf that is cut, and its size along the dim of the cut."""
        for number, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if isinstance(spec, TensorChunkSpec):
                if is_block_mask(leaf) and batch_of_mask(leaf) > 1:
                    yield number, batch_of_mask(leaf)
                elif isinstance(leaf, Tensor) and leaf.dim() > 0 and not leaf.is_nested:
                    yield number, leaf.shape[spec.split_dim]

    def or_whole(self) -> str:
        """Return the remedy for a leaf that cannot be cut, if there is a spec."""
        return f", or pass it whole with Replicate() in {self.spec_name}" if self.spec_name else ""


def _split(*wholes: _Whole, num_microbatches: int) -> list[list[Any]]:
    """Return the values of each microbatch, for each whole."""
    batches = {
        size: whole.leaf_name(number) for whole in wholes for number, size in whole.batches()
    }
    found = []
    for whole in wholes:
        columns = [
            _cut(whole, number, num_microbatches, batches) for number in range(len(whole.leaves))
        ]
        rows = ([column[mb] for column in columns] for mb in range(num_microbatches))
        found.append([pytree.tree_unflatten(row, whole.tree) for row in rows])
    return found


def _cut(
    whole: _Whole, number: int, num_microbatches: int, batches: dict[int, str]
) -> Sequence[Any]:
    """Return the leaf of each microbatch; `batches` has a name for each size of a batch."""
    leaf, spec = whole.leaves[number], whole.specs[number]
    if isinstance(spec, Reducer):
        raise MicrobatchError(
            f"{whole.spec_name} has a {type(spec).__name__} for {whole.leaf_name(number)}. A "
            "reducer joins outputs; expected TensorChunkSpec(dim), Replicate() or None."
        )
    if isinstance(spec, TensorChunkSpec):
        if isinstance(leaf, Tensor):
            if leaf.dim() > 0:
                return _cut_tensor(whole, number, spec.split_dim, num_microbatches)
        elif is_block_mask(leaf):
            if batch_of_mask(leaf) > 1 and num_microbatches > 1:
                return _cut_mask(whole, number, num_microbatches, batches)
        elif num_microbatches > 1 and holds_batch(leaf, batches):
            raise MicrobatchError(
                f"{whole.leaf_name(number)} is a {type(leaf).__name__} that holds tensors with a "
                "batch, which cannot be cut into microbatches. Expected tensors, or nested tuples, "
                f"lists and dicts of them. Register its class with {REGISTER_PYTREE_NODE}, "
                f"or cut it for step_microbatches{whole.or_whole()}."
            )
    return [leaf] * num_microbatches


def _cut_tensor(whole: _Whole, number: int, dim: int, num_microbatches: int) -> Sequence[Tensor]:
    leaf: Tensor = whole.leaves[number]
    parts: Sequence[Tensor] = ()
    cause: Exception | None = None
    try:
        is_enough = leaf.size(dim) >= num_microbatches
        if is_enough:
            parts = leaf.tensor_split(num_microbatches, dim)
    except (RuntimeError, TypeError) as exc:
        is_enough, cause = True, exc
    if not is_enough:
        raise MicrobatchError(
            f"{whole.leaf_name(number)} has size {leaf.shape[dim]} along dim {dim} (shape "
            f"{tuple(leaf.shape)}), too small for {num_microbatches} microbatches. Expected "
            f"{num_microbatches} or more. Use a larger batch or fewer microbatches"
            f"{whole.or_whole()}."
        )
    kinds = {type(leaf)} if not isinstance(leaf, nn.Parameter) else {Tensor, nn.Parameter}
    if not parts or not {type(part) for part in parts} <= kinds:
        raise MicrobatchError(
            f"{whole.leaf_name(number)} is a {type(leaf).__name__} of layout {leaf.layout}, which "
            f"cannot be cut along dim {dim}. Expected a dense tensor. Convert it, or cut it for "
            f"step_microbatches{whole.or_whole()}."
        ) from cause
    return parts


def _cut_mask(
    whole: _Whole, number: int, num_microbatches: int, batches: dict[int, str]
) -> Sequence[Any]:
    mask, spec = whole.leaves[number], whole.specs[number]
    batch, name = batch_of_mask(mask), whole.leaf_name(number)
    if spec != TensorChunkSpec(0):
        raise MicrobatchError(
            f"{name} is a BlockMask, but its spec is {spec}. Expected TensorChunkSpec(0), as a "
            f"mask can be cut along its batch only{whole.or_whole()}."
        )
    if batch < num_microbatches:
        raise MicrobatchError(
            f"{name} is a BlockMask with a batch of {batch}, too small for {num_microbatches} "
            f"microbatches. Expected 1, for a mask that all rows share, or {num_microbatches} or "
            f"more. Use a larger batch or fewer microbatches{whole.or_whole()}."
        )
    for size, other in batches.items():
        if size != batch:
            raise MicrobatchError(
                f"{name} is a BlockMask with a batch of {batch}, but {other} is cut along a size "
                f"of {size}. Expected the same batch for both, or a mask with a batch of 1. "
                f"Make the mask for the batch{whole.or_whole()}."
            )
    try:
        return cut_mask(mask, num_microbatches)
    except ValueError as exc:
        raise MicrobatchError(
            f"{name} is a BlockMask that cannot be cut: {exc}. Expected what create_block_mask "
            f"makes. Make it without that, or cut it for step_microbatches{whole.or_whole()}."
        ) from exc


def _require_count(name: str, count: Any) -> None:
    is_count = isinstance(count, int) and count > 0
    require(is_count, name, count, "the number of microbatches, an int of 1 or more")
