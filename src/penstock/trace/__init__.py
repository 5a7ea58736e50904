"""Cutting a model into stages: by tracing its forward, or between its modules."""

from penstock.trace.costs import LayerCost, count_layers, measure_layers
from penstock.trace.front import pipeline
from penstock.trace.marks import SplitPoint, pipe_split
from penstock.trace.modules import split
from penstock.trace.pipe import Pipe, PipeInfo, StageInfo
from penstock.trace.policies import Balanced

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
