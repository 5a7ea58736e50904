"""Drop-in replacement for torch.distributed.pipelining: the same names, constructors and steps."""

from penstock.compat._IR import Pipe, SplitPoint, pipe_split, pipeline
from penstock.compat.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.compat.schedules import (
    PipelineActivationLiveness,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleAuto,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
    analyze_pipeline_activation_liveness,
    get_schedule_class,
)
from penstock.compat.schedules import (
    _ScheduleForwardOnly as _ScheduleForwardOnly,
)
from penstock.compat.stage import PipelineStage, PipelineStageInfo, build_stage
from penstock.replacing.import_hook import install as install

__all__ = [
    "Pipe",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
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
]
