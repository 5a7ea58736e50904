"""Outputs that one stage hands over to another stage of the same rank."""

from typing import Any

from torch import Tensor

from penstock.backward.settling import PLAIN_TYPES
from penstock.errors import StageError
from penstock.ir import MicrobatchId
from penstock.microbatches.hidden_tensors import hides_gradient
from penstock.stage import PipelineStage
from penstock.stage.dtensors import copy_with_spread
from penstock.torch_private import REGISTER_PYTREE_NODE, is_dtensor


def hand_over(
    leaves: list[Any], stage: PipelineStage, mb: MicrobatchId, *, has_backward: bool
) -> None:
    """Prepare outputs for a stage of this rank; raise an error if gradients would be lost."""
    for number, leaf in enumerate(leaves):
        if has_backward and not isinstance(leaf, Tensor) and hides_gradient(leaf):
            raise StageError(
                f"stage {stage.stage_index}, microbatch {mb}: output {number} is a "
                f"{type(leaf).__name__} with a tensor that needs a gradient, which would be "
                "lost. Return tensors, tuples or dicts, or register its class with "
                f"{REGISTER_PYTREE_NODE}."
            )
    # A tensor that needs no gradient may be the stage's own, such as a buffer that it changes.
    leaves[:] = [_own_copy(leaf) for leaf in leaves]


def _own_copy(leaf: Any) -> Any:
    if (type(leaf) in PLAIN_TYPES or is_dtensor(leaf)) and not leaf.requires_grad:
        return copy_with_spread(leaf)
    return leaf
