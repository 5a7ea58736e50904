"""Join the values of all microbatches: the inverse of splitting."""

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock.errors import MicrobatchError
from penstock.microbatches.chunk_specs import Reducer, Spec, TensorChunkSpec, find_specs
from penstock.microbatches.hidden_tensors import holds_batch
from penstock.microbatches.masks import is_one_leaf
from penstock.microbatches.nested_values import in_words, is_leaf, leaf_names, require
from penstock.torch_private import pytree


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """Join the values of all microbatches into one, the inverse of a split.

    Tensors are joined along dim 0, or by `chunk_spec`, which mirrors the value of one microbatch.
    Without it, tensors that have no dims are stacked. Where a value is not a tensor, or the spec
    is None or Replicate, the result has the value of the first microbatch; a Reducer in the spec
    joins values by its function.

    >>> merge_chunks([(torch.tensor([0, 1]), "a"), (torch.tensor([2]), "b")])
    (tensor([0, 1, 2]), 'a')
    """
    is_filled = isinstance(chunks, tuple | list) and len(chunks) > 0
    require(is_filled, "chunks", chunks, "a list with the value of at least one microbatch")
    names, tree = leaf_names(chunks[0]), pytree.tree_structure(chunks[0], is_one_leaf)
    specs: list[Spec] = [TensorChunkSpec(0)] * len(names)
    if chunk_spec is not None:
        specs = list(find_specs(chunk_spec, chunks[0], "chunks[0]", "chunk_spec"))
    columns = zip(*(_flatten_like(tree, chunks, mb) for mb in range(len(chunks))), strict=True)
    return pytree.tree_unflatten(map(_merge_leaf, columns, specs, names), tree)


def check_was_joined(merged: Any, num_microbatches: int) -> None:
    """Raise an error if a joined value holds a batch of microbatch 0 alone, in an object."""
    for leaf in pytree.tree_leaves(merged, is_one_leaf):
        if num_microbatches > 1 and not isinstance(leaf, Tensor) and holds_batch(leaf, ()):
            raise MicrobatchError(
                f"the outputs of microbatches cannot be joined: the model returns a "
                f"{type(leaf).__name__}, which holds tensors but cannot be taken apart. Expected "
                "tensors, or tuples, lists or dicts of them. Let the model return these, register "
                "the class with torch's pytree, or leave out the outputs."
            )


def _flatten_like(tree: pytree.TreeSpec, chunks: Sequence[Any], mb: int) -> list[Any]:
    """Return the leaves of microbatch `mb` in the order of `tree`, that of microbatch 0."""
    leaves = None
    with suppress(ValueError):
        leaves = tree.flatten_up_to(chunks[mb])  # Finds the keys of dicts in any order.
    if leaves is None or not all(map(is_leaf, leaves)):
        raise MicrobatchError(
            f"microbatch {mb} is not nested like microbatch 0: chunks[{mb}] is "
            f"{in_words(chunks[mb])}, chunks[0] is {in_words(chunks[0])}. Expected the same "
            "structure from every microbatch. Let the model return it."
        )
    return leaves


def _merge_leaf(values: tuple[Any, ...], spec: Spec, name: str) -> Any:
    if isinstance(spec, Reducer):
        return reduce(spec.reduce_fn, values, spec.init_value)
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
                f"{in_words(value)}, chunks[0]{name} is {in_words(values[0])}. Expected tensors "
                f"whose shapes differ along dim {dim} only. To join along another dim, or to keep "
                "only that of microbatch 0, give a chunk_spec."
            )
    return torch.cat(values, dim) if values[0].dim() else torch.stack(values)


def _sizes_except(dim: int, value: Any) -> list[int] | None:
    """Return the sizes that must be equal to join along `dim`; None if it is not a tensor."""
    if not isinstance(value, Tensor):
        return None
    return [-1 if i in (dim, dim + value.dim()) else n for i, n in enumerate(value.shape)]
