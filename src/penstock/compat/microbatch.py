"""Batches cut into microbatches, under the names of torch.distributed.pipelining.microbatch."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.microbatches import Replicate as _Replicate
from penstock.microbatches import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.microbatches.chunk_specs import Reducer as _CustomReducer

__all__ = [
    "DEFAULT_CHUNK_DIM",
    "TensorChunkSpec",
    "_CustomReducer",
    "_LossReducer",
    "_Replicate",
    "_split_block_mask",
    "_split_tensor",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]

DEFAULT_CHUNK_DIM = 0


class _LossReducer(_CustomReducer):
    """A reducer of losses."""


sum_reducer = _LossReducer(torch.tensor(0.0), operator.add)


def __getattr__(name: str) -> Any:
    """Give the name of flex_attention's masks too, which takes a second to load."""
    if name == "BlockMask":
        from torch.nn.attention.flex_attention import BlockMask

        return BlockMask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _split_tensor(tensor: Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[Tensor]:
    """Return a tensor cut into microbatches."""
    args, _ = split_args_kwargs_into_chunks((tensor,), None, num_chunks, (spec,))
    return [part for (part,) in args]


def _split_block_mask(block_mask: Any, num_chunks: int) -> list[Any]:
    """Return a BlockMask cut along its batch; one with a batch of 1 goes whole."""
    args, _ = split_args_kwargs_into_chunks((block_mask,), None, num_chunks)
    return [part for (part,) in args]
