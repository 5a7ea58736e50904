"""Pipeline-parallel training for PyTorch.

Names load when they are first used, so `import penstock` is quick and does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import backward as backward
    from penstock import compat as compat
    from penstock import draw as draw
    from penstock import errors as errors
    from penstock import ir as ir
    from penstock import passes as passes
    from penstock import schedules as schedules
    from penstock.comm import LocalGroup as LocalGroup
    from penstock.comm import local_ranks as local_ranks
    from penstock.compat import Pipe as Pipe
    from penstock.compat import PipelineActivationLiveness as PipelineActivationLiveness
    from penstock.compat import PipelineScheduleMulti as PipelineScheduleMulti
    from penstock.compat import PipelineScheduleSingle as PipelineScheduleSingle
    from penstock.compat import PipelineStageInfo as PipelineStageInfo
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
    from penstock.compat import SplitPoint as SplitPoint
    from penstock.compat import TensorChunkSpec as TensorChunkSpec
    from penstock.compat import (
        analyze_pipeline_activation_liveness as analyze_pipeline_activation_liveness,
    )
    from penstock.compat import build_stage as build_stage
    from penstock.compat import get_schedule_class as get_schedule_class
    from penstock.compat import merge_chunks as merge_chunks
    from penstock.compat import pipe_split as pipe_split
    from penstock.compat import pipeline as pipeline
    from penstock.compat import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
    from penstock.compiling import compile as compile
    from penstock.costs import CostTable as CostTable
    from penstock.costs import pack as pack
    from penstock.cutting import Balanced as Balanced
    from penstock.cutting import CutModel as CutModel
    from penstock.cutting import LayerCost as LayerCost
    from penstock.cutting import count_layers as count_layers
    from penstock.cutting import cut as cut
    from penstock.cutting import cut_between_modules as cut_between_modules
    from penstock.cutting import measure_layers as measure_layers
    from penstock.dry import dry_run as dry_run
    from penstock.ir import Placement as Placement
    from penstock.ir import Schedule as Schedule
    from penstock.microbatches import Replicate as Replicate
    from penstock.parallel import GradScaler as GradScaler
    from penstock.parallel import ParallelModel as ParallelModel
    from penstock.parallel import load_pretrained as load_pretrained
    from penstock.parallel import parallelize as parallelize
    from penstock.planning import Plan as Plan
    from penstock.planning import plan as plan
    from penstock.runtime import Auto as Auto
    from penstock.runtime import Pipeline as Pipeline
    from penstock.runtime import measure_costs as measure_costs
    from penstock.runtime import measure_memory_levels as measure_memory_levels
    from penstock.runtime import record as record
    from penstock.sim import simulate as simulate
    from penstock.solver import SearchResult as SearchResult
    from penstock.solver import search as search
    from penstock.stage import PipelineStage as PipelineStage
    from penstock.timeline import Recording as Recording
    from penstock.timeline import Report as Report

__version__ = "0.1.0"
"""The version, as `penstock --version` prints it."""

# Each name that loads when it is first used, and the room that defines it.
# The imports above repeat all names for type checkers; a test compares the two.
_OWN_NAMES = {
    "Auto": "runtime",
    "Balanced": "cutting",
    "CostTable": "costs",
    "CutModel": "cutting",
    "GradScaler": "parallel",
    "LayerCost": "cutting",
    "LocalGroup": "comm",
    "ParallelModel": "parallel",
    "Pipeline": "runtime",
    "PipelineStage": "stage",
    "Placement": "ir",
    "Plan": "planning",
    "Recording": "timeline",
    "Replicate": "microbatches",
    "Report": "timeline",
    "Schedule": "ir",
    "SearchResult": "solver",
    "compile": "compiling",
    "count_layers": "cutting",
    "cut": "cutting",
    "cut_between_modules": "cutting",
    "dry_run": "dry",
    "load_pretrained": "parallel",
    "local_ranks": "comm",
    "measure_costs": "runtime",
    "measure_layers": "cutting",
    "measure_memory_levels": "runtime",
    "pack": "costs",
    "parallelize": "parallel",
    "plan": "planning",
    "record": "runtime",
    "search": "solver",
    "simulate": "sim",
}
# Rooms that are used by name, as in penstock.schedules.get("ZB-V").
_ROOMS = ("backward", "compat", "draw", "errors", "ir", "passes", "schedules")
# Names of torch.distributed.pipelining: code that changes one import finds them here too.
_DROP_IN_NAMES = (
    "Pipe",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleAuto",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TensorChunkSpec",
    "analyze_pipeline_activation_liveness",
    "build_stage",
    "get_schedule_class",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "split_args_kwargs_into_chunks",
)

__all__ = ["__version__", *_OWN_NAMES]


if not TYPE_CHECKING:  # A type checker that saw this would accept every name.

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        room = "compat" if name in _DROP_IN_NAMES else _OWN_NAMES.get(name)
        if room is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{room}"), name)
        globals()[name] = value  # The next use finds it without coming here.
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN_NAMES, *_ROOMS, *_DROP_IN_NAMES})
