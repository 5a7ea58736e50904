"""This process among the others: its process group and its device."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.nn  # Before there is a group, which torch keeps in it otherwise.
from torch.distributed import distributed_c10d

from penstock.comm import LocalGroup
from penstock.errors import StageError
from penstock.stage import GroupOrMesh
from penstock.torch_private import meet_by_environment

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
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        store, rank, num_ranks = _launched(*map(os.environ.get, names))
        # Apart from what an earlier group of these processes has left in the store.
        number = store.add(f"penstock/groups of rank {rank}", 1)
        prefix = distributed_c10d.PrefixStore(f"penstock/group {number}", store)
        dist.init_process_group(backend, store=prefix, rank=rank, world_size=num_ranks)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # It is in torch's docs.
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return True


@cache
def _launched(*_: str | None) -> tuple[distributed_c10d.Store, int, int]:
    """Return the store of all processes, this one's rank, and their number, for some variables.

    It stays until this process ends, which may keep it for the others.
    """
    return meet_by_environment()


def choose_device() -> torch.device:
    """Return an accelerator if there is one for each process of this machine, else the CPU.

    Of accelerators, only those are chosen that torch has a backend of their own for: gloo, which
    it names for some, would copy through the host.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found is None or _default_backend(found) in (None, "gloo"):
        return torch.device("cpu")
    if (num_devices := torch.accelerator.device_count()) < num_here:
        LOGGER.warning(
            "the CPU is used, as there are %d devices for %d processes", num_devices, num_here
        )
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


def _default_backend(device: torch.device) -> str | None:
    """Return the backend that torch chooses for a device; None if it knows none."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        return None
