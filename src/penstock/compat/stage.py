"""Stages with the attributes that scripts for torch.distributed.pipelining read."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from penstock.compat._utils import generate_stage_to_rank_mapping
from penstock.cutting.cut_model import CutInfo, stage_of
from penstock.errors import AssignmentError, StageError
from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward, StageId
from penstock.stage import GroupOrMesh
from penstock.stage import PipelineStage as _PipelineStageBase
from penstock.stage.forward_contexts import PipelineStageInfo

__all__ = ["PipelineStage", "PipelineStageInfo", "build_stage"]


@dataclass(slots=True)
class _Facts:
    """Facts about a stage's steps, which its schedule keeps up to date."""

    ranks: dict[StageId, int]
    has_backward: bool = False
    output_chunks: list[Any] = field(default_factory=list)
    run: Callable[[Action, Any, Any], None] | None = None
    """The function that runs an action of the stage, while a custom function is called."""


def _absent_buffers(name: str, empty: Any) -> property:
    """Return a property for buffers that torch's stages receive into; here, there are none.

    Programs clear them before they let a schedule learn other shapes, and that is all they can do.
    """

    def get(_: Any) -> Any:
        return copy(empty)

    def clear(_: Any, value: Any) -> None:
        if value:
            raise AssignmentError(
                f"{name} was set to {value!r}, but stages have no such buffers here. Expected "
                f"{empty!r}: messages bring their own memory."
            )

    return property(get, clear, doc="Always empty, and may be cleared.")


class PipelineStage(_PipelineStageBase):
    """A stage of Penstock that also has the attributes of torch's PipelineStage."""

    @cached_property
    def _facts(self) -> _Facts:
        return _Facts(generate_stage_to_rank_mapping(self.group_size, self.num_stages))

    args_recv_info = _absent_buffers("args_recv_info", {})
    grad_recv_info = _absent_buffers("grad_recv_info", {})
    grad_send_info = _absent_buffers("grad_send_info", None)

    @property
    def has_backward(self) -> bool:
        """True if the last step had a backward."""
        return self._facts.has_backward

    @property
    def output_chunks(self) -> list[Any]:
        """The outputs of each microbatch of the last step, on the last stage."""
        return self._facts.output_chunks

    @property
    def stage_index_to_group_rank(self) -> dict[StageId, int]:
        """The rank of each stage: round after round, until a schedule places them."""
        return self._facts.ranks

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, ranks: dict[StageId, int]) -> None:
        """Set the ranks, as torch's schedules do; the stage's schedule sets them by its order."""
        self._facts.ranks = ranks

    def clear_runtime_states(self) -> None:
        """Drop the outputs of the last step."""
        self._facts.output_chunks.clear()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of all parameters."""
        if grad_scale_factor != 1:
            for parameter in self.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale_factor)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> None:
        """Run a forward that a custom function was called for, with its loss and its messages."""
        self._run(Forward(self.stage_index, fwd_chunk_id), args, kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run a backward that a custom function was called for; it knows its loss by itself."""
        kind = Backward if full_backward else BackwardInput
        self._run(kind(self.stage_index, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run a weight backward that a custom function was called for."""
        self._run(BackwardWeight(self.stage_index, bwd_chunk_id))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Do nothing: a forward hands its outputs to the next stage by itself."""

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Do nothing: a backward hands its gradients to the previous stage by itself."""

    def get_local_bwd_output(self, mb_index: int) -> None:
        """Return nothing: a backward hands its gradients to the previous stage by itself."""

    def _run(self, action: Action, args: Any = None, kwargs: Any = None) -> None:
        if self._facts.run is None:
            raise StageError(
                f"stage {self.stage_index}: {action} was called outside of a custom function. "
                "Stages do not run by themselves here, as messages belong to the schedule. "
                "Call it in a function given to register_custom_function, or call step()."
            )
        self._facts.run(action, args, kwargs)


def note_step(
    stages: Mapping[StageId, _PipelineStageBase], outputs: list[Any], *, has_backward: bool
) -> None:
    """Tell the stages that have torch's attributes what a step was like."""
    for stage in stages.values():
        if isinstance(stage, PipelineStage):
            stage._facts.has_backward = has_backward
            stage._facts.output_chunks[:] = outputs if stage.is_last else []


def set_ranks(stages: Sequence[_PipelineStageBase], ranks: dict[StageId, int]) -> None:
    """Tell the stages that have torch's attributes where a schedule places all stages."""
    for stage in stages:
        if isinstance(stage, PipelineStage):
            stage._facts.ranks = ranks


def ranks_known_to(stage: _PipelineStageBase) -> dict[StageId, int]:
    """Return the rank of each stage, as far as one of them knows."""
    if isinstance(stage, PipelineStage):
        return stage.stage_index_to_group_rank
    return generate_stage_to_rank_mapping(stage.group_size, stage.num_stages)


def build_stage(
    stage_module: nn.Module,
    stage_index: StageId,
    pipe_info: CutInfo | int,
    device: torch.device | str,
    group: GroupOrMesh = None,
) -> _PipelineStageBase:
    """Make a stage from a module of a cut model, given `pipe.info()` or the number of stages."""
    if isinstance(pipe_info, int):
        module = stage_module.to(device)
        return PipelineStage(module, stage_index, pipe_info, device, group=group)
    if not isinstance(pipe_info, CutInfo):
        raise StageError(
            f"pipe_info is a {type(pipe_info).__name__}. Expected what pipe.info() returns, or "
            "the number of stages."
        )
    return stage_of(stage_module, stage_index, pipe_info, device, group, kind=PipelineStage)
