"""Stages: pieces of a model, and the passage of a microbatch through one."""

from penstock.stage.pipeline_stage import PipelineStage
from penstock.stage.stage_checks import Group, GroupOrMesh

__all__ = ["Group", "GroupOrMesh", "PipelineStage"]
