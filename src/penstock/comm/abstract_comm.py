"""The interface through which the runtime reaches other ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.errors import AgreementError
from penstock.ir import Rank
from penstock.ir.message import Channel
from penstock.watch.place import Place

BEGINNING = "to begin a first step with the same pipeline"

Describe: TypeAlias = Callable[[], str]
"""A function that returns what is waited for, called only if it must be shown."""


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self, described: Describe) -> None:
        """Wait until it has arrived (a receive) or may be changed (a send), or raise an error."""


class AbstractComm(ABC):
    """One rank's ends of all channels.

    There is a channel for each ordered pair of ranks. Its messages stay in order; messages of
    different channels have no order. It must be opened before its first message. The caller keeps
    each tensor that is sent or received until it has waited for the transfer.
    """

    rank: Rank
    num_ranks: int
    place: Place
    """Where this rank writes what it does, for the watch."""
    is_dry: ClassVar[bool] = False
    """True if there are no other ranks, and the messages that arrive are zeros."""

    @abstractmethod
    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        """Return the values of all ranks, on every rank. All ranks must call it.

        `what` says what they gather for, in error messages.
        """

    @abstractmethod
    def open(self, channels: Iterable[Channel]) -> None:
        """Connect those of these channels that are not connected yet; wait for the other ends.

        All ranks must call it, and both ends of a channel must name it. Channels between other
        ranks are ignored.
        """

    @abstractmethod
    def copies(self, receiver: Rank) -> bool:
        """Return whether a send has copied the tensor when it returns."""

    def packs(self, other: Rank) -> bool:
        """Return whether several small tensors should travel to or from a rank as one."""
        return False

    def needs_every_wait(self, other: Rank) -> bool:
        """Return whether each transfer must be waited for, even if it is certainly over.

        Otherwise the end of a transfer is also that of all before it in its channel.
        """
        return True

    @abstractmethod
    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        """Send a contiguous tensor without waiting. Raise an error if the channel is not open."""

    @abstractmethod
    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        """Post the receive of the channel's next message into `tensor`; otherwise like `send`."""

    @abstractmethod
    def fail(self, report: str) -> None:
        """Give up: ranks that wait for this one, now or later, raise the first report as CommError.

        Ranks that wait for other ranks learn of it when those give up in turn.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections; no rank may still be waiting for this one."""


class Work(Protocol):
    """A tensor on its way over a link."""

    def wait(self, timeout_s: float) -> None:
        """Wait like a Transfer, but raise the OSError or RuntimeError of the link's medium."""


class AbstractLink(ABC):
    """This process's end of both channels between it and another one."""

    copies: ClassVar[bool] = False
    """True if a send has copied the tensor when it returns."""
    packs: ClassVar[bool] = False
    """True if a transfer takes so long that small tensors should travel as one."""
    needs_every_wait: ClassVar[bool] = False
    """True if each transfer must be waited for, even if it is certainly over."""

    @abstractmethod
    def connect(self, channel: Channel, timeout_s: float) -> None:
        """Make one of the two channels ready for messages, if the medium needs that.

        The other process must call it too; this may wait for it, and raises what `wait` raises.
        """

    @abstractmethod
    def send(self, tensor: Tensor) -> Work:
        """Send a tensor, like `AbstractComm.send`."""

    @abstractmethod
    def recv(self, tensor: Tensor) -> Work:
        """Post a receive, like `AbstractComm.recv`."""

    @abstractmethod
    def close(self) -> None:
        """Wake the other process if it waits for this one, and make its later waits fail."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make all waits of this process fail, now and later; any thread may call it."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, for code that cannot copy its dtype."""
    return tensor.view(-1).view(torch.uint8)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of any dtype, in its own memory."""
    copy = torch.empty_like(tensor)
    as_bytes(copy).copy_(as_bytes(tensor))
    return copy


def check_agreement(values: list[dict[str, Any]], who: str = "rank") -> None:
    """Raise an error if the ranks were given different values; `values` has those of each rank.

    `who` says whose values they are, if not those of ranks.
    """
    for name in values[0]:
        found = [value[name] for value in values]
        if len(set(map(str, found))) > 1:
            given = "; ".join(f"{who} {rank}: {value}" for rank, value in enumerate(found))
            raise AgreementError(
                f"the {who}s disagree on {name} ({given}). Expected one value on all {who}s: make "
                "the pipeline in the same way everywhere."
            )
