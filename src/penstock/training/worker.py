"""The work of a process that is one rank of a run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from penstock.training.settings import TrainConfig
from penstock.training.text import Text
from penstock.training.trainer import StepDone, Trained, train


def work(config: TrainConfig, text: Text, on_step: Callable[[StepDone], None]) -> Trained:
    """Train as one rank."""
    with joined() as device:
        return train(config, text, device=device, on_step=on_step)


@contextmanager
def joined() -> Iterator[torch.device]:
    """Join the other ranks by the variables in the environment; yield the device to use."""
    device = _choose_device()
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    yield device
    dist.destroy_process_group()  # Not after an error: the other ranks may never reach this.


def _choose_device() -> torch.device:
    """Return an accelerator if there is one for each rank of this machine, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found is None or found.type != "cuda" or torch.accelerator.device_count() < num_here:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)
