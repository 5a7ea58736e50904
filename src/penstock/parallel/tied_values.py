"""A check that the copies of a tied parameter begin with the same values."""

from typing import Any

import torch
from torch import Tensor

from penstock.comm.collective_results import waited
from penstock.errors import AgreementError
from penstock.runtime import Pipeline
from penstock.torch_private import is_dtensor

_AT_ONCE = 2**18
"""The number of values that are converted at a time."""


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
    total = weighted = 0.0
    for number, part in enumerate(torch.split(local.detach().flatten(), _AT_ONCE)):
        # In parts: an embedding in 64 bits could take more memory than all else of a rank.
        wide = part.double()
        first = number * _AT_ONCE + 1
        places = torch.arange(first, first + len(wide), dtype=wide.dtype, device=wide.device)
        total += wide.sum().item()
        weighted += (wide * places).sum().item()
    return f"{total!r} {weighted!r}"
