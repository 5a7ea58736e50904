"""Models cut into stages, under the names of torch.distributed.pipelining._IR."""

from penstock.compat.pipe import Pipe, pipeline
from penstock.cutting import SplitPoint, pipe_split
from penstock.cutting.joined import child_name as get_submod_name

__all__ = ["Pipe", "PipeSplitWrapper", "SplitPoint", "get_submod_name", "pipe_split", "pipeline"]


class PipeSplitWrapper:
    """An older name of `SplitPoint`: PipeSplitWrapper.SplitPoint."""

    SplitPoint = SplitPoint
