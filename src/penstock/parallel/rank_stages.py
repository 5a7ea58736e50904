"""The stages of this rank, cut from a model and filled with its values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from penstock.cutting import CutModel
from penstock.errors import StageError
from penstock.ir import Placement, StageId
from penstock.parallel.example_batch import Microbatch
from penstock.parallel.given_cut import Cut, cut_as_given
from penstock.parallel.given_inputs import GivenInputs
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.spreading import Spreading, names_of_modules
from penstock.parallel.stage_names import StageNames
from penstock.runtime.step_settings import LossFn
from penstock.stage import GroupOrMesh, PipelineStage


@dataclass(frozen=True, slots=True)
class RankStages:
    """The stages of this rank, and what it knows of the whole model."""

    stages: list[PipelineStage]
    names: StageNames
    inputs: GivenInputs
    stays_in_eval: bool
    """True if the stages were traced in eval mode, which a trace cannot leave."""


def build_stages(
    model: nn.Module | Pretrained,
    cut: Cut,
    placement: Placement,
    microbatch: Microbatch,
    loss: LossFn | None,
    spreading: Spreading,
    device: torch.device,
    *,
    is_shared: bool,
    is_compiled: bool,
) -> RankStages:
    """Cut a model, and build the stages that the placement gives to this rank.

    The model is left without the parameters of other ranks, unless they share it.
    """
    weights = model if isinstance(model, Pretrained) else None
    whole = model.new_model() if isinstance(model, Pretrained) else model
    pieces = cut_as_given(whole, cut, placement, microbatch, loss)
    spreading.check(names_of_modules(pieces.modules), repeats_inputs=pieces.repeats_inputs)
    if is_compiled and pieces.repeats_inputs:
        raise StageError(
            "compile is True, but the model could not be traced, and was cut between its layers: "
            "the compiler cannot follow such stages. Leave compile out, or cut the model between "
            "its modules: cut=penstock.cut_between_modules(model, …)."
        )
    names = StageNames.of(pieces.modules)
    is_traced = any(isinstance(module, fx.GraphModule) for module in pieces.modules)
    stays_in_eval = is_traced and not whole.training
    inputs = GivenInputs.by_name(whole) if pieces.repeats_inputs else GivenInputs()
    rank, _ = spreading.dims.place
    group = spreading.dims.pipeline
    held = placement.stages_of(rank)
    stages = [_build_stage(pieces, index, device, group, weights) for index in held]
    if not is_shared:
        _free_others(whole, stages)
    return RankStages(stages, names, inputs, stays_in_eval)


def _build_stage(
    pieces: CutModel,
    index: StageId,
    device: torch.device,
    group: GroupOrMesh,
    weights: Pretrained | None,
) -> PipelineStage:
    """Return a stage on the device, with values from a folder if the model has none."""
    module = pieces.get_stage_module(index)
    buffers = {} if weights is None else weights.fill(module, device)
    return pieces.build_stage(index, device, group, buffers=buffers)


def _free_others(model: nn.Module, stages: Sequence[PipelineStage]) -> None:
    """Take the parameters and buffers of other ranks out of the model, which the caller has."""
    held = {
        tensor
        for stage in stages
        for tensor in (*stage.submod.parameters(), *stage.submod.buffers())
    }
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in held:
                empty = torch.empty_like(parameter, device="meta")
                setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer not in held:
                setattr(module, name, torch.empty_like(buffer, device="meta"))
