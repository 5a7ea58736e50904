"""Models cut into stages, under the names of torch.distributed.pipelining._IR."""

from penstock.compat.joined import child_name as get_submod_name
from penstock.compat.pipe import Pipe, pipeline
from penstock.cutting import SplitPoint, pipe_split

__all__ = ["Pipe", "PipeSplitWrapper", "SplitPoint", "get_submod_name", "pipe_split", "pipeline"]


class PipeSplitWrapper:
    """An older name of `SplitPoint`: PipeSplitWrapper.SplitPoint."""

    SplitPoint = SplitPoint
