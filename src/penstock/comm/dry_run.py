"""Channels of a dry run, in which this process is the only rank.

It pretends that the others exist: what is sent is dropped, and zeros are received. The ranks are
those of torch's "fake" process group, which do what this one does, or of a `DryGroup`, which says
what each of them has.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from penstock.comm.abstract_comm import BEGINNING, AbstractComm, Describe, Transfer
from penstock.comm.channels import OpenChannels
from penstock.ir import Rank
from penstock.ir.message import Channel
from penstock.watch.place import Place

_BACKEND = "fake"


def is_dry_run(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group only pretends to have other ranks."""
    return bool(dist.get_backend(group) == _BACKEND)


class DryGroup:
    """One rank of a pipeline whose other ranks do not exist; give it to a stage as its `group`.

    `others` returns what all ranks would gather, given the value of this one. `transfers` has the
    bytes of each tensor that was sent or received, in the order of its channel.
    """

    def __init__(self, rank: Rank, num_ranks: int, others: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.transfers: defaultdict[Channel, list[int]] = defaultdict(list)
        self._others = others

    def connect(self) -> AbstractComm:
        """Return this rank's ends of channels that lead nowhere."""
        return DryRunComm(self.rank, self.num_ranks, self._others, self.transfers)


def fake_group_comm(group: dist.ProcessGroup | None) -> AbstractComm:
    """Return the channels of torch's "fake" process group, whose ranks all have the same."""
    num_ranks = dist.get_world_size(group)
    return DryRunComm(
        dist.get_rank(group), num_ranks, lambda value: [value] * num_ranks, defaultdict(list)
    )


class DryRunComm(AbstractComm):
    """The ends of channels that lead nowhere."""

    is_dry = True

    def __init__(
        self,
        rank: Rank,
        num_ranks: int,
        others: Callable[[Any], list[Any]],
        transfers: defaultdict[Channel, list[int]],
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.place = Place.unread()
        self._others = others
        self._transfers = transfers
        self._channels = OpenChannels(rank)

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        return self._others(value)

    def open(self, channels: Iterable[Channel]) -> None:
        self._channels.open(channels, lambda channel: None)

    def copies(self, receiver: Rank) -> bool:
        return False

    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        self._channels.check(self.rank, receiver)
        self._transfers[Channel(self.rank, receiver)].append(tensor.nbytes)
        return _Done()

    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        self._channels.check(sender, self.rank)
        self._transfers[Channel(sender, self.rank)].append(tensor.nbytes)
        tensor.zero_()
        return _Done()

    def fail(self, report: str) -> None:
        """Do nothing: there is no other rank to tell."""

    def close(self) -> None:
        """Do nothing: nothing is connected."""


class _Done:
    def wait(self, described: Describe) -> None:
        """Return at once."""
