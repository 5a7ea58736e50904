"""Stages: pieces of a model, and the passage of a microbatch through one."""

from penstock.stage.pipeline_stage import PipelineStage, build_stage
from penstock.stage.stage_checks import Group

__all__ = ["Group", "PipelineStage", "build_stage"]
