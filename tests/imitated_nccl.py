"""An imitation of NCCL, for ranks that are threads of `penstock.local_ranks`.

It keeps what matters for deadlocks. A group makes its communicator at its first use, which blocks
the rank until the other end uses the group too. A send is over only when it has been received, and
messages of a group are received in the order in which they were sent. If no rank can go on, all of
them raise at once, with what each waits for: a run that ends shows that there is no circle.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from penstock import LocalGroup
from penstock.comm import AbstractComm, Describe, Transfer
from penstock.comm.abstract_comm import BEGINNING, Work
from penstock.comm.channels import OpenChannels
from penstock.comm.links import PairLink
from penstock.ir.message import Channel

WaitUntil = Callable[[Callable[[], bool], Describe], None]
Pairs = dict[Channel, "Pair"]


class Pair:
    """What the two ends of a group share."""

    def __init__(self) -> None:
        self.users: set[int] = set()
        self.sent: deque[Message] = deque()
        self.posted: deque[Message] = deque()
        self.num_delivered = 0

    def deliver(self) -> None:
        if self.sent and self.posted:
            source, target = self.sent.popleft(), self.posted.popleft()
            assert (source.tensor.shape, source.tensor.dtype) == (
                target.tensor.shape,
                target.tensor.dtype,
            )
            target.tensor.copy_(source.tensor)
            source.is_over = target.is_over = True
            self.num_delivered += 1


class Message:
    """One end of a transfer: what a group's `send` and `recv` return."""

    def __init__(self, tensor: Tensor, wait_until: WaitUntil, described: str) -> None:
        self.tensor = tensor
        self.is_over = False
        self._wait_until, self._described = wait_until, described

    def wait(self, timeout: timedelta | None = None) -> None:
        self._wait_until(lambda: self.is_over, lambda: self._described)


class PairEnd:
    """One rank's end of a group of two: the sender is its rank 0, the receiver its rank 1."""

    def __init__(self, pair: Pair, channel: Channel, rank: int, wait_until: WaitUntil) -> None:
        self._pair, self._channel, self._rank = pair, channel, rank
        self._wait_until = wait_until
        self.is_aborted = False

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Message:
        assert (self._channel.sender, 1) == (self._rank, receiver)
        return self._start(self._pair.sent, tensors, "to be received")

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Message:
        assert (self._channel.receiver, 0) == (self._rank, sender)
        return self._start(self._pair.posted, tensors, "to be sent")

    def abort(self) -> None:
        self.is_aborted = True

    def _start(self, queue: deque[Message], tensors: list[Tensor], what: str) -> Message:
        self._pair.users.add(self._rank)
        sender, receiver = self._channel
        name = f"{sender} to {receiver}"
        self._wait_until(lambda: len(self._pair.users) == 2, lambda: f"a first use of {name}")
        (tensor,) = tensors
        message = Message(tensor, self._wait_until, f"a message from {name} {what}")
        queue.append(message)
        self._pair.deliver()
        return message


class ImitatedComm(AbstractComm):
    """A comm by real PairLinks, opened by the real code, over imitated groups.

    `pairs` is one dictionary for all ranks.
    """

    def __init__(self, group: LocalGroup, pairs: Pairs) -> None:
        self.rank, self.num_ranks = group.rank, group.num_ranks
        self.ends: dict[Channel, PairEnd] = {}
        self._pairs = pairs
        self._group = group
        self._loopback: Any = LocalGroup.connect(group)
        self.place = self._loopback.place
        self._links = {
            other: PairLink(self.rank, other, torch.device("cpu"), self.make_pair)
            for other in range(self.num_ranks)
            if other != self.rank
        }
        self._channels = OpenChannels(self.rank)

    def make_pair(self, channel: Channel) -> PairEnd:
        pair = self._pairs.setdefault(channel, Pair())
        self.ends[channel] = PairEnd(pair, channel, self.rank, self._wait_until)
        return self.ends[channel]

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        gathered: list[Any] = self._loopback.gather(value, what)
        return gathered

    def open(self, channels: Iterable[Channel]) -> None:
        self._channels.open(channels, self._connect)

    def copies(self, receiver: int) -> bool:
        return PairLink.copies

    def send(self, tensor: Tensor, receiver: int) -> Transfer:
        self._channels.check(self.rank, receiver)
        return LinkTransfer(self._links[receiver].send(tensor))

    def recv(self, tensor: Tensor, sender: int) -> Transfer:
        self._channels.check(sender, self.rank)
        return LinkTransfer(self._links[sender].recv(tensor))

    def fail(self, report: str) -> None:
        self._loopback.fail(report)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _connect(self, channel: Channel) -> None:
        other = channel.receiver if channel.sender == self.rank else channel.sender
        self._links[other].connect(channel, timeout_s=1.0)

    def _wait_until(self, is_ready: Callable[[], bool], described: Describe) -> None:
        # The turns of local ranks: there is no other way to wait among them.
        self._group._world.wait_until(self.rank, self._loopback._line, is_ready, described)


class LinkTransfer:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, described: Describe) -> None:
        self._work.wait(1.0)


def imitate_nccl(group: LocalGroup, lines: defaultdict[int, Pairs]) -> list[ImitatedComm]:
    """Let all connections of `group` be imitated; returns those that there are.

    `lines` is one for all ranks: they find each other by how many connections they have made.
    """
    made: list[ImitatedComm] = []

    def connect() -> AbstractComm:
        made.append(ImitatedComm(group, lines[len(made)]))
        return made[-1]

    group.connect = connect  # type: ignore[method-assign]  # There is no other way in.
    return made
