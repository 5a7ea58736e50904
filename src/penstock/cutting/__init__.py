"""Cutting a model into stages: by tracing its forward, or between its modules."""

from penstock.cutting.cut_model import Pipe, PipeInfo, StageInfo
from penstock.cutting.cut_policies import Balanced
from penstock.cutting.layer_costs import LayerCost, count_layers, measure_layers
from penstock.cutting.marks import SplitPoint, pipe_split
from penstock.cutting.traced_cut import pipeline
from penstock.cutting.untraced_cut import split

__all__ = [
    "Balanced",
    "LayerCost",
    "Pipe",
    "PipeInfo",
    "SplitPoint",
    "StageInfo",
    "count_layers",
    "measure_layers",
    "pipe_split",
    "pipeline",
    "split",
]
