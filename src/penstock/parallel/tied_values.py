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
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The dtypes in which bits are read, by the bytes of an element."""


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
    """Return a short text that differs for different values, with near certainty.

    Bits are added up as whole numbers, modulo 2^64: so the order does not matter, which depends on
    threads and devices.
    """
    local: Tensor = waited(parameter.to_local()) if is_dtensor(parameter) else parameter
    if local.is_meta or not local.numel():
        return "empty"
    bits = local.detach().contiguous().flatten().view(_WHOLE_NUMBERS[local.element_size()])
    total = weighed = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, len(bits), _AT_ONCE):  # The whole in 64 bits would take too much memory.
        part = bits[start : start + _AT_ONCE].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(part), device=local.device)
        total, weighed = total + part.sum(), weighed + (part * places).sum()
    return f"{total.item()} {weighed.item()}"
