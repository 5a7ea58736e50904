"""Products of DTensors: each rank multiplies its own shards, with no communication.

    left         right        left @ right
    Shard(0)     Replicate    Shard(0)        each rank has some of the rows
    Replicate    Shard(1)     Shard(1)        ... of the columns
    Shard(1)     Shard(0)     Partial         ... of the addends of every number
    Replicate    Replicate    Replicate
    Partial      Replicate    Partial         and the other way round
    Shard(batch) Shard(batch) Shard(batch)    of batched products

The rule holds for each dimension of the mesh by itself, and gives the placements of DTensor's own
product. For any other pair that one is used, which may move shards between ranks first.
"""

from typing import TYPE_CHECKING, cast

from torch import Tensor

from penstock.backward.settling import PLAIN_TYPES, is_plain
from penstock.backward.terms import MatrixProduct, ShardedProduct, Term
from penstock.torch_private import is_async_tensor, is_dtensor, local_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def product_of(left: Tensor, right: Tensor, alpha: float = 1, is_transposed: bool = False) -> Term:
    """Return the term `alpha * left @ right`, transposed if `is_transposed`."""
    if type(left) not in PLAIN_TYPES and is_sharded(left) and is_sharded(right):
        sharded_left, sharded_right = cast("DTensor", left), cast("DTensor", right)
        placements = _product_placements(sharded_left, sharded_right)
        if placements is not None:
            return ShardedProduct(
                sharded_left, sharded_right, placements, alpha, is_transposed=is_transposed
            )
    return MatrixProduct(left, right, alpha, is_transposed)


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether it is a DTensor of which this rank holds a plain part."""
    if not is_dtensor(tensor):
        return False
    shard = local_shard(cast(Tensor, tensor))
    return is_plain(shard) or is_async_tensor(shard)


def shard_of(tensor: Tensor) -> Tensor | None:
    """Return this rank's part of a DTensor, in the user's memory; None if there is no such part."""
    shard = local_shard(tensor) if is_dtensor(tensor) else None
    return shard if shard is not None and is_plain(shard) else None


def shares_memory(tensor: Tensor, shard: Tensor) -> bool:
    """Return whether a DTensor's part is in the memory of `shard`."""
    own = shard_of(tensor)
    return (
        own is not None and own.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    )


def has_known_placements(tensor: Tensor) -> bool:
    """Return whether the rule above may apply to a DTensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # Loaded already.

    placements = cast("DTensor", tensor).placements
    return all(type(placement) in (Shard, Replicate, Partial) for placement in placements)


def can_multiply_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer with a DTensor `weight` can be a product of matrices.

    To see all but the last dimension of `x` as rows takes communication if it is sharded in one
    of the middle.
    """
    if not (is_sharded(x) and x.dim() >= 2 and has_known_placements(x)):
        return False
    x, weight = cast("DTensor", x), cast("DTensor", weight)
    if x.device_mesh != weight.device_mesh:
        return False
    ends = range(0, x.dim(), x.dim() - 1)
    return all(getattr(placement, "dim", 0) in ends for placement in x.placements)


def _product_placements(left: "DTensor", right: "DTensor") -> "list[Placement] | None":
    """Return the placements of `left @ right` by the rule; None if it does not apply."""
    if left.device_mesh != right.device_mesh or left.dim() != right.dim():
        return None
    found: list[Placement] = []
    for of_left, of_right in zip(left.placements, right.placements, strict=True):
        placement = _product_placement(of_left, of_right, rows=left.dim() - 2)
        if placement is None:
            return None
        found.append(placement)
    return found


def _product_placement(left: "Placement", right: "Placement", rows: int) -> "Placement | None":
    """Return the placement of a product in one dimension of the mesh; None if there is no rule.

    `rows` is the dimension of the rows; that of the columns comes next.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # Loaded already.

    kinds = type(left), type(right)
    if kinds == (Shard, Shard):
        left_dim, right_dim = cast(Shard, left).dim, cast(Shard, right).dim
        if (left_dim, right_dim) == (rows + 1, rows):
            return Partial()
        return left if left_dim == right_dim < rows else None
    if Replicate not in kinds:
        return None
    other, dim = (left, rows) if kinds[1] is Replicate else (right, rows + 1)
    if type(other) is Shard:
        return other if other.dim == dim else None
    if type(other) is Partial:
        return other if other.reduce_op in ("sum", "avg") else None
    return other if type(other) is Replicate else None
