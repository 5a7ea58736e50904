"""Links that torch.distributed carries: gloo between machines, NCCL between CUDA devices."""

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from penstock.comm.base import AbstractLink, Work
from penstock.ir import Rank

_TAG = 0
_TAG_OF_NO_MESSAGE = 1


class GlooLink(AbstractLink):
    """Shares one gloo group with all other links of its process.

    gloo keeps the messages of each ordered pair of ranks in order, and lets those of different
    pairs pass each other.
    """

    def __init__(self, group: Any, other: Rank) -> None:
        self._group = group  # torch's types do not say that it can send and receive.
        self._other = other

    def send(self, tensor: Tensor) -> Work:
        return _GlooWork(self._group.send([tensor], self._other, _TAG))

    def recv(self, tensor: Tensor) -> Work:
        return _GlooWork(self._group.recv([tensor], self._other, _TAG))

    def close(self) -> None:
        """By a receive that ends too late, at which gloo closes all connections of the group.

        Nothing else does that for sure: connections live as long as any transfer, and those
        are in tracebacks.
        """
        with contextlib.suppress(RuntimeError):
            work = self._group.recv([torch.empty(1)], self._other, _TAG_OF_NO_MESSAGE)
            work.wait(timedelta(milliseconds=1))


class _GlooWork:
    __slots__ = ("_work",)

    def __init__(self, work: distributed_c10d.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timedelta(seconds=timeout_s))


class NcclLink(AbstractLink):
    """Has a group for each direction.

    NCCL runs all that two ranks exchange in a group on one stream, where a send would wait for
    the receive before it.
    """

    def __init__(
        self, store: distributed_c10d.Store, rank: Rank, other: Rank, timeout_s: float
    ) -> None:
        self._there = _nccl_pair(store, sender=rank, receiver=other, rank=rank, timeout_s=timeout_s)
        self._back = _nccl_pair(store, sender=other, receiver=rank, rank=rank, timeout_s=timeout_s)

    def send(self, tensor: Tensor) -> Work:
        return _NcclWork(self._there.send([tensor], 1, _TAG))

    def recv(self, tensor: Tensor) -> Work:
        return _NcclWork(self._back.recv([tensor], 0, _TAG))

    def close(self) -> None:
        self._there.abort()
        self._back.abort()


def _nccl_pair(
    store: distributed_c10d.Store, *, sender: Rank, receiver: Rank, rank: Rank, timeout_s: float
) -> Any:
    """A group of two: the sender is its rank 0, the receiver its rank 1."""
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    prefix = distributed_c10d.PrefixStore(f"nccl from {sender} to {receiver}", store)
    return distributed_c10d.ProcessGroupNCCL(prefix, 0 if rank == sender else 1, 2, options)


class _NcclWork:
    __slots__ = ("_work",)

    def __init__(self, work: distributed_c10d.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """The stream waits; with a timeout the host would. NCCL keeps the deadline."""
        self._work.wait()
