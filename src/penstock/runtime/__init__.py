"""Runs schedules: one executor for all of them."""

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.recording.recorded_block import Run, record
from penstock.runtime.step_settings import ActionContext, Batch

__all__ = ["ActionContext", "Batch", "Pipeline", "Run", "record"]
