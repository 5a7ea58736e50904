"""Channels of a dry run: torch's "fake" process group, in which this process is the only rank.

It pretends that all other ranks do the same: what is sent is dropped, and zeros are received.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from penstock.comm.abstract_comm import BEGINNING, AbstractComm, Describe, Transfer
from penstock.comm.channels import OpenChannels
from penstock.ir import Rank
from penstock.ir.message import Channel

_BACKEND = "fake"


def is_dry_run(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group only pretends to have other ranks."""
    return bool(dist.get_backend(group) == _BACKEND)


class DryRunComm(AbstractComm):
    """The ends of channels that lead nowhere."""

    is_dry = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._channels = OpenChannels(self.rank)

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        return [value] * self.num_ranks

    def open(self, channels: Iterable[Channel]) -> None:
        self._channels.open(channels, lambda channel: None)

    def copies(self, receiver: Rank) -> bool:
        return True

    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        self._channels.check(self.rank, receiver)
        return _Done()

    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        self._channels.check(sender, self.rank)
        tensor.zero_()
        return _Done()

    def fail(self, report: str) -> None:
        """Do nothing: there is no other rank to tell."""

    def close(self) -> None:
        """Do nothing: nothing is connected."""


class _Done:
    def wait(self, described: Describe) -> None:
        """Return at once."""
