"""Cut the masks of flex_attention, `BlockMask`, along their batch.

torch's pytree takes tuples, lists, dicts and registered classes apart, but not a BlockMask.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def is_block_mask(value: Any) -> bool:
    """Return whether this is a mask of flex_attention, without importing flex_attention."""
    flex_attention = sys.modules.get(_FLEX_ATTENTION)
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def is_one_leaf(value: Any) -> bool:
    """Return whether this must not be taken apart, even if pytree knows how to."""
    return isinstance(value, PackedSequence) or is_block_mask(value)


def batch_of_mask(mask: Any) -> int:
    """Return the size of a mask's batch; 1 if it has no batch and applies to every row."""
    blocks: Tensor = mask.kv_num_blocks
    return blocks.shape[0] if blocks.dim() > 2 else 1


def cut_mask(mask: Any, num_microbatches: int) -> list[Any]:
    """Return the mask of each microbatch, cut like tensors; raise a ValueError if it cannot be cut.

    `mask_mod` takes rows of the whole batch, so each piece adds its first row.
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
