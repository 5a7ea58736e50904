"""Cut a model into stages: by tracing its forward, or between its modules."""

from penstock.cutting.cut_choice import cut_any
from penstock.cutting.cut_model import CutInfo, CutModel, StageInfo
from penstock.cutting.cut_policies import Balanced
from penstock.cutting.layer_costs import count_layers, measure_layers
from penstock.cutting.loss_costs import count_loss
from penstock.cutting.marks import SplitPoint, pipe_split
from penstock.cutting.rerun_cut import cut_between_layers
from penstock.cutting.shape_counts import LayerCost
from penstock.cutting.traced_cut import cut
from penstock.cutting.untraced_cut import cut_between_modules

__all__ = [
    "Balanced",
    "CutInfo",
    "CutModel",
    "LayerCost",
    "SplitPoint",
    "StageInfo",
    "count_layers",
    "count_loss",
    "cut",
    "cut_any",
    "cut_between_layers",
    "cut_between_modules",
    "measure_layers",
    "pipe_split",
]
