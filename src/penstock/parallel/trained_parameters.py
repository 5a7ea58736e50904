"""A check that parameters are trained where that has an effect."""

from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError
from penstock.ir import Rank
from penstock.stage import PipelineStage


class TrainedParameters:
    """The parameters whose `requires_grad` must stay as it was when their stages were wrapped."""

    def __init__(self, stages: Iterable[PipelineStage]) -> None:
        self._replicated = {
            parameter: parameter.requires_grad
            for stage in stages
            if isinstance(stage.submod, DistributedDataParallel)
            for parameter in stage.submod.parameters()
        }

    def check(
        self,
        rank: Rank,
        parameters: Iterable[nn.Parameter],
        optimizers: Collection[torch.optim.Optimizer],
    ) -> None:
        """Raise an error if parameters are trained that were not, where that has no effect.

        `optimizers` are those that step in the backward.
        """
        stepped = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        if stepped and any(p.requires_grad and p not in stepped for p in parameters):
            raise StageError(
                f"rank {rank}: a parameter is trained that was frozen when the optimizers "
                "that step in the backward were made, so none would step it. Add it to one of "
                "pipe.optimizers with add_param_group()."
            )
        for parameter, is_trained in self._replicated.items():
            if parameter.requires_grad is not is_trained:
                raise StageError(
                    f"rank {rank}: requires_grad of a parameter has changed since its stage "
                    "was wrapped in DistributedDataParallel, which would not reduce gradients any "
                    "more. Set it before parallelize(), or use a mesh dimension 'fsdp'."
                )
