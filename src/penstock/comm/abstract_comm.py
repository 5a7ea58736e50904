"""What the runtime asks of any way to reach other ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.errors import AgreementError
from penstock.ir import Rank
from penstock.ir.message import Channel

BEGINNING = "to begin a first step with the same pipeline"

Describe: TypeAlias = Callable[[], str]
"""Says what is waited for, if anyone has to be told; not called otherwise."""


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self, described: Describe) -> None:
        """Return when it has arrived (a receive), or may be changed (a send); or raise."""


class AbstractComm(ABC):
    """One rank's ends of all channels.

    There is a channel for each ordered pair of ranks. Its messages stay in order, and are
    ordered against nothing else. It must be opened before its first message. Whoever sends or
    receives a tensor keeps it until the transfer has been waited for.
    """

    rank: Rank
    num_ranks: int

    @abstractmethod
    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        """Every rank's value, on every rank. All ranks must call it.

        `what` is what they come together for, if anyone has to be told.
        """

    @abstractmethod
    def open(self, channels: Iterable[Channel]) -> None:
        """Connect these channels, unless they are already; waits for the other ends.

        All ranks must call it, and both ends of a channel must name it. Channels of other ranks
        may be among them, and are left to those.
        """

    @abstractmethod
    def copies(self, receiver: Rank) -> bool:
        """Return whether a send has copied the tensor when it returns."""

    @abstractmethod
    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        """Send a contiguous tensor; does not wait. Raises if the channel is not open."""

    @abstractmethod
    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        """Post the receive of the channel's next message into `tensor`; otherwise as `send`."""

    @abstractmethod
    def fail(self, report: str) -> None:
        """Give up: all who wait for this rank, now or later, get a CommError with the first report.

        Ranks that wait for others learn it when those have given up in turn.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections; nobody may be waiting for this rank any more."""


class Work(Protocol):
    """A tensor on its way over a link."""

    def wait(self, timeout_s: float) -> None:
        """As a Transfer's; raises an OSError or RuntimeError as the link's medium does."""


class AbstractLink(ABC):
    """This process's end of both channels between it and another one."""

    copies: ClassVar[bool] = False
    """Whether a send has copied the tensor when it returns."""

    @abstractmethod
    def connect(self, channel: Channel, timeout_s: float) -> None:
        """Make one of the two ready for messages, if the medium needs that; raises as `wait`.

        The other process must call it too, and may be waited for.
        """

    @abstractmethod
    def send(self, tensor: Tensor) -> Work:
        """As a comm's."""

    @abstractmethod
    def recv(self, tensor: Tensor) -> Work:
        """As a comm's."""

    @abstractmethod
    def close(self) -> None:
        """Wake up the other process if it waits for this one, and let it wait no more."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, for what can copy bytes but not tensors of its dtype."""
    return tensor.view(-1).view(torch.uint8)


def copy_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of any dtype in memory of their own."""
    copy = torch.empty_like(tensor)
    as_bytes(copy).copy_(as_bytes(tensor))
    return copy


def check_agreement(values: list[dict[str, Any]]) -> None:
    """Raises if what the ranks were given differs; `values` has what each was, by name."""
    for name in values[0]:
        found = [value[name] for value in values]
        if len(set(map(str, found))) > 1:
            given = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(found))
            raise AgreementError(
                f"the ranks disagree on {name} ({given}). Expected one value on all ranks: make "
                "the pipeline in the same way everywhere."
            )
