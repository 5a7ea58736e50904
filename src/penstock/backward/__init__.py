"""The split backward: a stage's backward as an input backward and a weight backward."""

import penstock.torch_private  # noqa: F401 (checks torch)
from penstock.backward.engine import PendingBackward, PendingWeights, SplitEngine
from penstock.backward.functions import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.backward.groups import ParamGroup

__all__ = [
    "ParamGroup",
    "PendingBackward",
    "PendingWeights",
    "SplitEngine",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
