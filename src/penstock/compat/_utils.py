"""Errors, placements and types of torch.distributed.pipelining._utils."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx

from penstock.cutting import CutInfo
from penstock.errors import PipeliningMetadataError, PipeliningShapeError, ScheduleError
from penstock.stage.meshes import GetMesh
from penstock.stage.passage import needs_grad
from penstock.torch_private import pytree

__all__ = [
    "GetMeshCallback",
    "PipeInfo",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
]

GetMeshCallback: TypeAlias = GetMesh


@dataclass(frozen=True)
class PipeInfo(CutInfo):
    """A description of a pipe, with the graph that joins its stages."""

    graph: fx.Graph | None = None
    has_loss_and_backward: bool = False


_STYLES: dict[str, Callable[[int, int], int]] = {
    "loop": lambda stage, size: stage % size,
    "v": lambda stage, size: (stage if stage // size % 2 == 0 else -1 - stage) % size,
}


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """Return the rank of each stage: round after round, or up and down with the style "v".

    >>> generate_stage_to_rank_mapping(2, 4, "v")
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    if style not in _STYLES:
        raise ScheduleError(f"style is {style!r}. Expected one of {', '.join(_STYLES)}.")
    if style == "v" and num_stages % pp_size:
        raise ScheduleError(
            f"num_stages is {num_stages}, but pp_size is {pp_size}. Expected a multiple of it."
        )
    return {stage: _STYLES[style](stage, pp_size) for stage in range(num_stages)}


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """Return the stages of each rank, in ascending order.

    >>> generate_rank_to_stage_mapping(2, 4, "v")
    {0: [0, 3], 1: [1, 2]}
    """
    ranks = generate_stage_to_rank_mapping(pp_size, num_stages, style)
    return {
        rank: [stage for stage, holder in ranks.items() if holder == rank]
        for rank in range(pp_size)
    }


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Return the leaves of nested arguments; with `detach`, also copies outside of any graph.

    Those come first, nested like the arguments, and then as leaves.
    """
    leaves, structure = pytree.tree_flatten(args)
    if not detach:
        return leaves
    own = [
        leaf.detach().requires_grad_(needs_grad(leaf)) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(own, structure), own


def flatten_args_detach(args: Any) -> Any:
    """Return `flatten_args(args, detach=True)`."""
    return flatten_args(args, detach=True)
