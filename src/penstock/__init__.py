"""Pipeline-parallel training for PyTorch.

Names load when they are first used, so `import penstock` is quick, and stays so without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.errors import (
    AgreementError,
    AssignmentError,
    BackwardError,
    CommError,
    CostError,
    DeadlineError,
    DrawError,
    InputError,
    MicrobatchError,
    OptionError,
    PartitionError,
    PipelineError,
    PipeliningMetadataError,
    PipeliningShapeError,
    RecordError,
    ScheduleError,
    StageError,
    TorchError,
    TraceError,
)

if TYPE_CHECKING:
    from penstock import draw as draw
    from penstock import ir as ir
    from penstock import partition as partition
    from penstock import passes as passes
    from penstock import schedules as schedules
    from penstock import sim as sim
    from penstock import solver as solver
    from penstock.backward import ForwardPass as ForwardPass
    from penstock.backward import PendingWeights as PendingWeights
    from penstock.backward import SplitEngine as SplitEngine
    from penstock.backward import stage_backward as stage_backward
    from penstock.backward import stage_backward_input as stage_backward_input
    from penstock.backward import stage_backward_weight as stage_backward_weight
    from penstock.comm import LocalGroup as LocalGroup
    from penstock.comm import local_ranks as local_ranks
    from penstock.compat import PipelineScheduleMulti as PipelineScheduleMulti
    from penstock.compat import PipelineScheduleSingle as PipelineScheduleSingle
    from penstock.compat import Schedule1F1B as Schedule1F1B
    from penstock.compat import ScheduleAuto as ScheduleAuto
    from penstock.compat import ScheduleDualPipeV as ScheduleDualPipeV
    from penstock.compat import ScheduleGPipe as ScheduleGPipe
    from penstock.compat import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from penstock.compat import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
    from penstock.compat import ScheduleLoopedBFS as ScheduleLoopedBFS
    from penstock.compat import ScheduleVHalf as ScheduleVHalf
    from penstock.compat import ScheduleVMin as ScheduleVMin
    from penstock.compat import ScheduleZBH1 as ScheduleZBH1
    from penstock.compat import ScheduleZBH2 as ScheduleZBH2
    from penstock.compat import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from penstock.compat import get_schedule_class as get_schedule_class
    from penstock.costs import CostTable as CostTable
    from penstock.cutting import Balanced as Balanced
    from penstock.cutting import LayerCost as LayerCost
    from penstock.cutting import Pipe as Pipe
    from penstock.cutting import SplitPoint as SplitPoint
    from penstock.cutting import count_layers as count_layers
    from penstock.cutting import measure_layers as measure_layers
    from penstock.cutting import pipe_split as pipe_split
    from penstock.cutting import pipeline as pipeline
    from penstock.cutting import split as split
    from penstock.ir import Placement as Placement
    from penstock.ir import Schedule as Schedule
    from penstock.microbatches import Replicate as Replicate
    from penstock.microbatches import TensorChunkSpec as TensorChunkSpec
    from penstock.microbatches import merge_chunks as merge_chunks
    from penstock.microbatches import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
    from penstock.planning import Plan as Plan
    from penstock.planning import PlanRow as PlanRow
    from penstock.planning import plan as plan
    from penstock.runtime import Pipeline as Pipeline
    from penstock.runtime import record as record
    from penstock.runtime.measuring.stage_costs import measure_costs as measure_costs
    from penstock.sim import simulate as simulate
    from penstock.solver import SearchResult as SearchResult
    from penstock.solver import search as search
    from penstock.stage import PipelineStage as PipelineStage
    from penstock.stage import build_stage as build_stage
    from penstock.timeline import Recording as Recording
    from penstock.timeline import Report as Report

__version__ = "0.1.0"
"""The version, as `penstock --version` tells it."""

# Each name that loads when it is used, and the module that has it.
# The imports above repeat it for type checkers; a test compares the two.
_LAZY_NAMES = {
    "Balanced": "penstock.cutting",
    "CostTable": "penstock.costs",
    "ForwardPass": "penstock.backward",
    "LayerCost": "penstock.cutting",
    "LocalGroup": "penstock.comm",
    "PendingWeights": "penstock.backward",
    "Pipe": "penstock.cutting",
    "Pipeline": "penstock.runtime",
    "PipelineScheduleMulti": "penstock.compat",
    "PipelineScheduleSingle": "penstock.compat",
    "PipelineStage": "penstock.stage",
    "Placement": "penstock.ir",
    "Plan": "penstock.planning",
    "PlanRow": "penstock.planning",
    "Recording": "penstock.timeline",
    "Replicate": "penstock.microbatches",
    "Report": "penstock.timeline",
    "Schedule": "penstock.ir",
    "Schedule1F1B": "penstock.compat",
    "ScheduleAuto": "penstock.compat",
    "ScheduleDualPipeV": "penstock.compat",
    "ScheduleGPipe": "penstock.compat",
    "ScheduleInterleaved1F1B": "penstock.compat",
    "ScheduleInterleavedZeroBubble": "penstock.compat",
    "ScheduleLoopedBFS": "penstock.compat",
    "ScheduleVHalf": "penstock.compat",
    "ScheduleVMin": "penstock.compat",
    "ScheduleZBH1": "penstock.compat",
    "ScheduleZBH2": "penstock.compat",
    "ScheduleZBVZeroBubble": "penstock.compat",
    "SearchResult": "penstock.solver",
    "SplitEngine": "penstock.backward",
    "SplitPoint": "penstock.cutting",
    "TensorChunkSpec": "penstock.microbatches",
    "build_stage": "penstock.stage",
    "count_layers": "penstock.cutting",
    "draw": "penstock",
    "get_schedule_class": "penstock.compat",
    "ir": "penstock",
    "local_ranks": "penstock.comm",
    "measure_costs": "penstock.runtime.measuring.stage_costs",
    "measure_layers": "penstock.cutting",
    "merge_chunks": "penstock.microbatches",
    "partition": "penstock",
    "passes": "penstock",
    "plan": "penstock.planning",
    "solver": "penstock",
    "pipe_split": "penstock.cutting",
    "pipeline": "penstock.cutting",
    "record": "penstock.runtime",
    "schedules": "penstock",
    "search": "penstock.solver",
    "sim": "penstock",
    "simulate": "penstock.sim",
    "split": "penstock.cutting",
    "split_args_kwargs_into_chunks": "penstock.microbatches",
    "stage_backward": "penstock.backward",
    "stage_backward_input": "penstock.backward",
    "stage_backward_weight": "penstock.backward",
}

__all__ = [
    "AgreementError",
    "AssignmentError",
    "BackwardError",
    "CommError",
    "CostError",
    "DeadlineError",
    "DrawError",
    "InputError",
    "MicrobatchError",
    "OptionError",
    "PartitionError",
    "PipelineError",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "RecordError",
    "ScheduleError",
    "StageError",
    "TorchError",
    "TraceError",
    "__version__",
    *_LAZY_NAMES,
]


if not TYPE_CHECKING:  # A type checker that saw this would accept every name.

    def __getattr__(name: str) -> object:
        if name not in _LAZY_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _LAZY_NAMES[name]
        if module == __name__:
            return import_module(f"{__name__}.{name}")
        value = getattr(import_module(module), name)
        globals()[name] = value  # The next use finds it without coming here.
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_NAMES})
