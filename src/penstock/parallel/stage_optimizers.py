"""Optimizers that step in the backward, one for each stage."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from penstock.errors import StageError
from penstock.ir import StageId
from penstock.stage import PipelineStage
from penstock.stage.stage_checks import unwrapped

MakeOptimizer: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def check_skips(make: MakeOptimizer | None, bad_values: object) -> None:
    """Raise an error if optimizers would use gradients of steps that are to be skipped."""
    if make is not None and bad_values == "skip":
        raise StageError(
            "bad_values is 'skip', but with optimizer_in_backward, optimizers use gradients before "
            "all ranks know that they are finite. Expected one of the two: leave "
            "optimizer_in_backward out, and step an optimizer after the step."
        )


def make_optimizers(
    stages: Sequence[PipelineStage], make: MakeOptimizer | None
) -> dict[StageId, torch.optim.Optimizer]:
    """Return an optimizer for each stage that has parameters to train; none without `make`."""
    if make is None:
        return {}
    named = {
        stage.stage_index: [
            (name, parameter)
            for name, parameter in unwrapped(stage.submod).named_parameters()
            if parameter.requires_grad
        ]
        for stage in stages
    }
    return {stage: make(parameters) for stage, parameters in named.items() if parameters}


def stepping(
    optimizers: Mapping[StageId, torch.optim.Optimizer],
) -> Callable[[PipelineStage], None]:
    """Return what steps the optimizer of a stage, and drops the gradients that it used."""

    def step(stage: PipelineStage) -> None:
        optimizer = optimizers.get(stage.stage_index)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step
