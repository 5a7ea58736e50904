"""Cutting the arguments of a step into microbatches, and joining what comes out of them.

The names and parameters are those of torch.distributed.pipelining.microbatch, so scripts keep
working. One thing differs on purpose: there are always as many microbatches as were asked for.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

import penstock.torch_version  # noqa: F401 (warns)
from penstock.arguments import batch_of_mask, cut_mask, holds_batch, is_block_mask, is_one_leaf
from penstock.errors import MicrobatchError


@dataclass(frozen=True, slots=True, repr=False)
class TensorChunkSpec:
    """Says that a tensor, or every tensor in a nested value, is cut along `split_dim`."""

    split_dim: int

    def __post_init__(self) -> None:
        is_int = isinstance(self.split_dim, int)
        _require(is_int, "split_dim", self.split_dim, "an int, or Replicate() for a whole value")

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """The specs for a tuple of dims, which may nest tuples, lists and dicts.

        >>> TensorChunkSpec.from_tuple((0, [1, None]))
        (TensorChunkSpec(0), [TensorChunkSpec(1), None])
        """
        return tuple(pytree.tree_map(_as_spec, chunk_dims))

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """The specs for a dict of dims, which may nest tuples, lists and dicts.

        >>> TensorChunkSpec.from_dict({"id": 0, "mask": 1})
        {'id': TensorChunkSpec(0), 'mask': TensorChunkSpec(1)}
        """
        return dict(pytree.tree_map(_as_spec, chunk_dims))


@dataclass(frozen=True, slots=True)
class Replicate:
    """Says that a value is given whole to every microbatch; None in a spec says the same.

    >>> x, specs = torch.arange(4), (TensorChunkSpec(0), Replicate())
    >>> split_args_kwargs_into_chunks((x, x), None, 2, specs)[0][1]
    (tensor([2, 3]), tensor([0, 1, 2, 3]))
    """


Spec = TensorChunkSpec | Replicate | None


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The args and the kwargs of each of `chunks` microbatches, as views of the tensors given.

    Tensors are cut along dim 0 like torch.tensor_split does, so sizes may differ by one. Tensors
    without dims and all that is no tensor go whole to every microbatch, but a BlockMask is cut
    along its batch, and objects that hold a batch are refused. A spec says otherwise: it
    mirrors the nesting of the args, and one TensorChunkSpec, Replicate or None in it may stand
    for all that is nested there. Without args (or kwargs) their spec has nothing to say.

    >>> args, kwargs = split_args_kwargs_into_chunks((torch.arange(5),), {"scale": 2.0}, 2)
    >>> args
    [(tensor([0, 1, 2]),), (tensor([3, 4]),)]
    >>> kwargs
    [{'scale': 2.0}, {'scale': 2.0}]
    """
    are_args, are_kwargs = isinstance(args, tuple | list), isinstance(kwargs, dict | None)
    _require(are_args, "args", args, "a tuple; for a single argument, write (argument,)")
    _require(are_kwargs, "kwargs", kwargs, "a dict, or None if there are no keyword arguments")
    _require_count("chunks", chunks)
    first, second = _split(
        _Whole.of(tuple(args), "args", args_chunk_spec, "args_chunk_spec"),
        _Whole.of(dict(kwargs or {}), "kwargs", kwargs_chunk_spec, "kwargs_chunk_spec"),
        num_microbatches=chunks,
    )
    return first, second


def split_target(target: Any, num_microbatches: int) -> list[Any]:
    """The target of each microbatch, cut as arguments without a spec are.

    >>> split_target({"label": torch.arange(4)}, 2)
    [{'label': tensor([0, 1])}, {'label': tensor([2, 3])}]
    """
    _require_count("num_microbatches", num_microbatches)
    return _split(_Whole.of(target, "target", None, ""), num_microbatches=num_microbatches)[0]


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """One value from those of all microbatches, the inverse of a split.

    Tensors are joined along dim 0, or as `chunk_spec` says, which mirrors the value of one
    microbatch. Without it, tensors that have no dims are stacked. Of what is no tensor, and where
    the spec is None or Replicate, the result has the first microbatch's.

    >>> merge_chunks([(torch.tensor([0, 1]), "a"), (torch.tensor([2]), "b")])
    (tensor([0, 1, 2]), 'a')
    """
    is_filled = isinstance(chunks, tuple | list) and len(chunks) > 0
    _require(is_filled, "chunks", chunks, "a list with the value of at least one microbatch")
    names, tree = _leaf_names(chunks[0]), pytree.tree_structure(chunks[0], is_one_leaf)
    specs: list[Spec] = [TensorChunkSpec(0)] * len(names)
    if chunk_spec is not None:
        specs = list(_find_specs(chunk_spec, chunks[0], "chunks[0]", "chunk_spec"))
    columns = zip(*(_flatten_like(tree, chunks, mb) for mb in range(len(chunks))), strict=True)
    return pytree.tree_unflatten(map(_merge_leaf, columns, specs, names), tree)


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
            specs = list(_find_specs(spec, value, name, spec_name))
        return cls(value, name, spec_name, leaves, specs, tree)

    def leaf_name(self, number: int) -> str:
        return f"{self.name}{_leaf_names(self.value)[number]}"

    def batches(self) -> Iterator[tuple[int, int]]:
        """The number of each leaf that is cut, and the size that it is cut along."""
        for number, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if isinstance(spec, TensorChunkSpec):
                if is_block_mask(leaf) and batch_of_mask(leaf) > 1:
                    yield number, batch_of_mask(leaf)
                elif isinstance(leaf, Tensor) and leaf.dim() > 0 and not leaf.is_nested:
                    yield number, leaf.shape[spec.split_dim]

    def or_whole(self) -> str:
        """The remedy for what cannot be cut, if there is a spec to say it in."""
        return f", or give it whole by Replicate() in {self.spec_name}" if self.spec_name else ""


def _split(*wholes: _Whole, num_microbatches: int) -> list[list[Any]]:
    """The values of each microbatch, of each whole."""
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
    """One leaf for each microbatch; `batches` has a name for each size of a batch."""
    leaf, spec = whole.leaves[number], whole.specs[number]
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
                "lists and dicts of them. Register its class with torch.utils._pytree."
                f"register_pytree_node, or cut it for step_microbatches{whole.or_whole()}."
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
            f"{tuple(leaf.shape)}), too little for {num_microbatches} microbatches. Expected "
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
            f"{name} is a BlockMask with a batch of {batch}, too little for {num_microbatches} "
            f"microbatches. Expected 1, for a mask that all rows share, or {num_microbatches} or "
            f"more. Use a larger batch or fewer microbatches{whole.or_whole()}."
        )
    for size, other in batches.items():
        if size != batch:
            raise MicrobatchError(
                f"{name} is a BlockMask with a batch of {batch}, but {other} is cut along a size "
                f"of {size}. Expected one batch for all that is cut, or a mask with a batch of 1. "
                f"Make the mask for the batch{whole.or_whole()}."
            )
    try:
        return cut_mask(mask, num_microbatches)
    except ValueError as exc:
        raise MicrobatchError(
            f"{name} is a BlockMask that cannot be cut: {exc}. Expected what create_block_mask "
            f"makes. Make it without, or cut it for step_microbatches{whole.or_whole()}."
        ) from exc


def _find_specs(spec: Any, value: Any, name: str, spec_name: str) -> Iterator[Spec]:
    """The spec of each leaf of `value`, in the order in which it is flattened."""
    parts, spec_parts = _parts(value), _parts(spec)
    if isinstance(spec, Spec) and parts is None:
        if isinstance(spec, TensorChunkSpec) and isinstance(value, Tensor):
            has_dim = -value.dim() <= spec.split_dim < value.dim()
            wanted = f"a tensor with the dim of {spec}, or Replicate() for it in {spec_name}"
            _require(has_dim, name, value, wanted)
        yield spec
        return
    if isinstance(spec, Spec) and parts is not None:
        spec_parts = dict.fromkeys(parts, spec)
    if parts is None or spec_parts is None or parts.keys() != spec_parts.keys():
        raise MicrobatchError(
            f"{spec_name} does not mirror {name}, which is {_describe(value)}: there it holds "
            f"{_describe(spec)}. Expected TensorChunkSpec(dim) to cut it, Replicate() or None to "
            "give it whole, or specs nested like it. TensorChunkSpec.from_tuple makes them of ints."
        )
    for key, part in parts.items():
        yield from _find_specs(spec_parts[key], part, f"{name}{key}", spec_name)


def _flatten_like(tree: pytree.TreeSpec, chunks: Sequence[Any], mb: int) -> list[Any]:
    """The leaves of microbatch `mb` in the order of `tree`, which is microbatch 0's."""
    leaves = None
    with suppress(ValueError):
        leaves = tree.flatten_up_to(chunks[mb])  # Finds the keys of dicts in any order.
    if leaves is None or not all(map(_is_leaf, leaves)):
        raise MicrobatchError(
            f"microbatch {mb} is not nested like microbatch 0: chunks[{mb}] is "
            f"{_describe(chunks[mb])}, chunks[0] is {_describe(chunks[0])}. Expected the same "
            "structure from every microbatch. Let the model return it."
        )
    return leaves


def _merge_leaf(values: tuple[Any, ...], spec: Spec, name: str) -> Any:
    is_cut = len(values) > 1 and isinstance(spec, TensorChunkSpec)
    if is_cut and isinstance(values[0], PackedSequence):
        raise MicrobatchError(
            f"microbatches cannot be joined: chunks[0]{name} is a PackedSequence, whose rows are "
            "interleaved. Expected tensors. Let the model return a padded tensor, or give a "
            "chunk_spec with None for it, which keeps that of microbatch 0."
        )
    has_tensor = any(isinstance(value, Tensor) for value in values)
    if not has_tensor or not isinstance(spec, TensorChunkSpec):
        return values[0]
    dim = spec.split_dim
    for mb, value in enumerate(values):
        if _sizes_except(dim, value) != _sizes_except(dim, values[0]):
            raise MicrobatchError(
                f"microbatch {mb} cannot be joined with microbatch 0: chunks[{mb}]{name} is "
                f"{_describe(value)}, chunks[0]{name} is {_describe(values[0])}. Expected tensors "
                f"whose shapes differ along dim {dim} only. To join along another dim, or to keep "
                "only that of microbatch 0, give a chunk_spec."
            )
    return torch.cat(values, dim) if values[0].dim() else torch.stack(values)


def _sizes_except(dim: int, value: Any) -> list[int] | None:
    """What must be equal for tensors to be joined along `dim`; None for what is no tensor."""
    if not isinstance(value, Tensor):
        return None
    return [-1 if i in (dim, dim + value.dim()) else n for i, n in enumerate(value.shape)]


def _as_spec(dim: Any) -> Spec:
    return dim if isinstance(dim, Spec) else TensorChunkSpec(dim)


def _require(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        raise MicrobatchError(f"{name} is {_describe(value)}; expected {expected}.")


def _require_count(name: str, count: Any) -> None:
    is_count = isinstance(count, int) and count > 0
    _require(is_count, name, count, "the number of microbatches, an int of 1 or more")


def _is_leaf(value: Any) -> bool:
    return is_one_leaf(value) or pytree.tree_is_leaf(value)


def _parts(value: Any) -> dict[str, Any] | None:
    """What a container holds, by what one writes after its name; None if it is no container."""
    if _is_leaf(value):
        return None

    def is_part(node: Any) -> bool:
        return node is not value

    try:
        paths, _ = pytree.tree_flatten_with_path(value, is_part)
    except ValueError:  # Whoever registered this type did not tell how to name its parts.
        return {f"[{i}]": part for i, part in enumerate(pytree.tree_leaves(value, is_part))}
    return {pytree.keystr(path): part for path, part in paths}


def _leaf_names(value: Any) -> list[str]:
    """What one writes after the name of `value` for each of its leaves."""
    parts = _parts(value)
    if parts is None:
        return [""]
    return [key + name for key, part in parts.items() for name in _leaf_names(part)]


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    if is_one_leaf(value):
        return f"a {type(value).__name__}"
    if pytree.tree_is_leaf(value):
        return short_repr(value)
    return f"a {type(value).__name__} with {', '.join(_leaf_names(value)) or 'nothing in it'}"
