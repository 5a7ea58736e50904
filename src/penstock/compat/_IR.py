"""Models cut into stages, under the names of torch.distributed.pipelining._IR."""

from penstock.cutting import CutModel as Pipe
from penstock.cutting import SplitPoint, pipe_split
from penstock.cutting import cut as pipeline

__all__ = ["Pipe", "PipeSplitWrapper", "SplitPoint", "pipe_split", "pipeline"]


class PipeSplitWrapper:
    """An older name of `SplitPoint`: PipeSplitWrapper.SplitPoint."""

    SplitPoint = SplitPoint
