"""This process among the others: its process group and its device."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn  # Before there is a group, which torch keeps in it otherwise.

from penstock.comm import LocalGroup
from penstock.errors import StageError
from penstock.stage import GroupOrMesh

LOGGER = logging.getLogger("penstock")


@contextmanager
def joined_ranks(device: torch.device, group: GroupOrMesh) -> Iterator[bool]:
    """Make the process group, unless there is one or ranks are threads; yield whether it was made.

    If the block fails, the group that was made for it ends.
    """
    was_made = not isinstance(group, LocalGroup) and join_ranks(device)
    try:
        yield was_made
    except BaseException:
        if was_made:
            dist.destroy_process_group()
        raise


def join_ranks(device: torch.device) -> bool:
    """Make the process group, unless there is one; return whether it was made.

    The variables of torchrun say who the other processes are. Without them, this process is the
    only one: a script runs without a launcher too.
    """
    if dist.is_initialized():
        return False
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(given) == 1:
        raise StageError(
            f"of the variables RANK and WORLD_SIZE, only {given[0]} is set, so it is not known "
            "which processes there are. Start the script with torchrun, call "
            "torch.distributed.init_process_group() yourself, or set neither to train on this "
            "process alone."
        )
    backend = "gloo" if device.type == "cpu" else None
    if given:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # It is in torch's docs.
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return True


def choose_device() -> torch.device:
    """Return a CUDA device if there is one for each process of this machine, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found is None or found.type != "cuda":
        return torch.device("cpu")
    if (num_devices := torch.accelerator.device_count()) < num_here:
        LOGGER.warning(
            "the CPU is used, as there are %d devices for %d processes", num_devices, num_here
        )
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)
