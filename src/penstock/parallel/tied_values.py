"""A check that the copies of a tied parameter begin with the same values."""

from typing import Any

import torch
from torch import Tensor

from penstock.comm.collective_results import waited
from penstock.errors import AgreementError
from penstock.runtime import Pipeline
from penstock.torch_private import is_dtensor


def check_tied_values(pipeline: Pipeline) -> None:
    """Raise an error on all ranks if copies of a tied parameter differ; they would stay different.

    All ranks must call it.
    """
    own = [
        (name, f"{param_name!r} of stage {stage.stage_index}", _digest(parameter))
        for stage in pipeline.stages.values()
        for param_name, name, parameter in stage.tied_parameters()
    ]
    copies = pipeline.gather(own, "to compare tied parameters")
    first: dict[str, tuple[str, str]] = {}
    for rank, claims in enumerate(copies):
        for name, described, digest in claims:
            place = f"{described} on rank {rank}"
            known_place, known = first.setdefault(name, (place, digest))
            if known != digest:
                raise AgreementError(
                    f"the tied parameter {name!r} has other values as {place} than as "
                    f"{known_place}. Expected the same model on all ranks: call "
                    "torch.manual_seed() before making it, or load the same weights."
                )


@torch.no_grad()
def _digest(parameter: Any) -> str:
    """Return a short text that differs for different values, with near certainty."""
    local: Tensor = waited(parameter.to_local()) if is_dtensor(parameter) else parameter
    if local.is_meta or not local.numel():
        return "empty"
    wide = local.detach().double().flatten()
    places = torch.arange(1, len(wide) + 1, dtype=torch.float64, device=wide.device)
    return f"{wide.sum().item()!r} {(wide * places).sum().item()!r}"
