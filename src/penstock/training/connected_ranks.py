"""The connection of a run's ranks, besides those of its pipelines."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.comm import AbstractComm, LocalGroup, ProcessGroupComm
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S
from penstock.stage import Group


@contextmanager
def connected(group: Group, device: torch.device) -> Iterator[AbstractComm]:
    """Connect the ranks for messages of a run; an error in the block reaches all ranks."""
    comm: AbstractComm
    if isinstance(group, LocalGroup):
        comm = group.connect()
    else:
        comm = ProcessGroupComm(group, device, DEFAULT_TIMEOUT_S)
    try:
        yield comm
        # No rank leaves while another may still read from it.
        comm.gather(None, "to end together")
        comm.close()
    except BaseException as error:
        comm.fail(f"{type(error).__name__}: {error}")
        raise
