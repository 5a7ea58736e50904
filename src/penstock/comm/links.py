"""Links over torch.distributed: gloo between machines, NCCL and others between accelerators."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from penstock.comm.abstract_comm import AbstractLink, Work, as_bytes
from penstock.errors import StageError
from penstock.ir import Rank
from penstock.ir.message import Channel
from penstock.torch_private import make_registered_backend, set_timeout

MakePair: TypeAlias = Callable[[Channel], Any]
"""A function that makes this rank's end of a channel's group."""

_TAG = 0
_TAG_OF_NO_MESSAGE = 1


class GlooLink(AbstractLink):
    """A link over the gloo group that all links of its process share.

    gloo keeps the messages of each ordered pair of ranks in order; messages of different pairs may
    overtake each other. Another thread makes each transfer, and wakes the one that waits for it.
    """

    packs = True
    # No wait is needed for what a message from the other rank shows to be over: gloo notes the end
    # of a send before it reads anything that arrives later on the same connection.
    needs_every_wait = False

    def __init__(self, group: Any, other: Rank) -> None:
        self._group = group  # torch's types do not say that it can send and receive.
        self._other = other

    def connect(self, channel: Channel, timeout_s: float) -> None:
        """Do nothing: the group connected all of its ranks when it was made."""

    def send(self, tensor: Tensor) -> Work:
        return _GlooWork(self._group.send([tensor], self._other, _TAG))

    def recv(self, tensor: Tensor) -> Work:
        return _GlooWork(self._group.recv([tensor], self._other, _TAG))

    def close(self) -> None:
        """Post a receive that times out, so that gloo closes all connections of the group.

        Nothing else closes them reliably: connections live as long as any transfer, and tracebacks
        keep transfers alive.
        """
        with contextlib.suppress(RuntimeError):
            work = self._group.recv([torch.empty(1)], self._other, _TAG_OF_NO_MESSAGE)
            work.wait(timedelta(milliseconds=1))

    def interrupt(self) -> None:
        """Close all connections of the group: gloo ends the waits of all its threads then."""
        self.close()


class _GlooWork:
    __slots__ = ("_work",)

    def __init__(self, work: distributed_c10d.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timedelta(seconds=timeout_s))


class PairLink(AbstractLink):
    """A link between accelerators, with a group of two for each channel that is connected.

    NCCL runs all messages of two ranks in a group on one stream, where a send would wait for the
    receive before it; the backends of other devices are written like it. It supports few dtypes,
    so it is given bytes. `make_pair` makes this rank's end of a channel's group, in which the
    sender is rank 0 and the receiver is rank 1.
    """

    # A wait lets this device's stream wait, so that memory is not used again too early.
    needs_every_wait = True

    def __init__(self, rank: Rank, other: Rank, device: torch.device, make_pair: MakePair) -> None:
        self._there, self._back = Channel(rank, other), Channel(other, rank)
        self._device = device
        self._make_pair = make_pair
        self._groups: dict[Channel, Any] = {}

    def connect(self, channel: Channel, timeout_s: float) -> None:
        """Exchange a first message, since a group makes its communicator at its first use."""
        self._groups[channel] = self._make_pair(channel)
        tensor = torch.zeros(1, device=self._device)
        work = self._send(tensor) if channel == self._there else self._recv(tensor)
        work.wait(timedelta(seconds=timeout_s))  # With a timeout the host waits, not the stream.

    def send(self, tensor: Tensor) -> Work:
        return _NcclWork(self._send(as_bytes(tensor)))

    def recv(self, tensor: Tensor) -> Work:
        return _NcclWork(self._recv(as_bytes(tensor)))

    def close(self) -> None:
        for group in self._groups.values():
            with contextlib.suppress(AttributeError, RuntimeError):  # Not every backend has it.
                group.abort()

    def interrupt(self) -> None:
        """Abort the groups: NCCL lets other threads do so."""
        self.close()

    def _send(self, tensor: Tensor) -> distributed_c10d.Work:
        work: distributed_c10d.Work = self._groups[self._there].send([tensor], 1, _TAG)
        return work

    def _recv(self, tensor: Tensor) -> distributed_c10d.Work:
        work: distributed_c10d.Work = self._groups[self._back].recv([tensor], 0, _TAG)
        return work


def nccl_pair(store: distributed_c10d.Store, rank: Rank, timeout_s: float, channel: Channel) -> Any:
    """Make this rank's end of a channel's group, once the other end is about to do the same.

    NCCL has no deadline while it makes a communicator, so the two ranks first meet in the store.
    """
    prefix = meet_at(store, rank, channel, timeout_s)
    options = distributed_c10d.ProcessGroupNCCL.Options()
    set_timeout(options, timedelta(seconds=timeout_s))
    return distributed_c10d.ProcessGroupNCCL(prefix, channel.index(rank), 2, options)


def backend_pair(
    store: distributed_c10d.Store, rank: Rank, timeout_s: float, backend: str, channel: Channel
) -> Any:
    """Make this rank's end of a channel's group over a backend by its name, as `nccl_pair`."""
    prefix = meet_at(store, rank, channel, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    kind = getattr(distributed_c10d, f"ProcessGroup{backend.upper()}", None)  # Such as XCCL.
    if kind is None:
        return make_registered_backend(backend, prefix, channel.index(rank), 2, timeout)
    options = kind.Options()
    set_timeout(options, timeout)
    return kind(prefix, channel.index(rank), 2, options)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that a process group has for a device."""
    described = str(dist.get_backend_config(group))
    named = dict(part.split(":", 1) for part in described.split(",") if ":" in part)
    if device.type not in named:
        raise StageError(
            f"device is {device}, and the process group has no backend for {device.type} (it has "
            f"{described}). Make it with one, such as init_process_group('{device.type}:…'), or "
            "put the stages on cpu or cuda."
        )
    return named[device.type]


def meet_at(
    store: distributed_c10d.Store, rank: Rank, channel: Channel, timeout_s: float
) -> distributed_c10d.Store:
    """Wait for the other end of a channel; return a store for their group."""
    sender, receiver = channel
    prefix = distributed_c10d.PrefixStore(f"channel from {sender} to {receiver}", store)
    meet(prefix, rank, receiver if rank == sender else sender, timeout_s)
    return prefix


def meet(store: distributed_c10d.Store, rank: Rank, other: Rank, timeout_s: float) -> None:
    """Wait until the other rank calls this too; raise a RuntimeError if it does not in time."""
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {other} is here"], timedelta(seconds=timeout_s))


class _NcclWork:
    __slots__ = ("_work",)

    def __init__(self, work: distributed_c10d.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """Let the stream wait; with a timeout the host would wait. NCCL keeps the deadline."""
        self._work.wait()
