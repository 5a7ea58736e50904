"""What is measured in some steps of a run: the bubble, and the memory of the ranks."""

import sys
from dataclasses import dataclass

import torch

from penstock.errors import RecordError
from penstock.parallel import ParallelModel
from penstock.training.settings import TrainConfig

_TIMES = 20
"""The approximate number of times in a run of any length."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the ranks measured of the last steps."""

    bubble: float | None
    """The share of a typical step in which ranks were idle; None before one is recorded."""
    memory_bytes: int
    """The most memory that a rank of the first pipeline has held so far."""


def is_watched(config: TrainConfig, step: int) -> bool:
    """Return whether ranks measure after a step."""
    return step == config.steps or step % max(config.steps // _TIMES, 1) == 0


def watch(pipe: ParallelModel, config: TrainConfig, step: int) -> Seen | None:
    """Measure, if it is time; all ranks must call it."""
    if not is_watched(config, step):
        return None
    held = pipe.pipeline.gather(peak_memory(pipe.device), "to compare their memory")
    try:
        bubble = pipe.recording().typical().bubble_by_makespan
    except RecordError:  # "auto" does not record its first step.
        bubble = None
    return Seen(bubble, max(held))


def peak_memory(device: torch.device) -> int:
    """Return the most memory, in bytes, that this process has held."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "win32":  # It has no such count.
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
