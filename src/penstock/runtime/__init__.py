"""Run schedules: one executor for all of them."""

from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.measuring.level_costs import measure_memory_levels
from penstock.runtime.measuring.stage_costs import measure_costs
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.recording.recorded_block import RecordedRun, record
from penstock.runtime.step_settings import ActionContext, Batch

__all__ = [
    "ActionContext",
    "Auto",
    "Batch",
    "Pipeline",
    "RecordedRun",
    "measure_costs",
    "measure_memory_levels",
    "record",
]
