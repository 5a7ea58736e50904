"""Channels over torch.distributed.

A pipeline opens connections of its own, so giving up closes nothing that anyone else uses. On the
CPU one gloo group carries all channels: it keeps the messages of each ordered pair of ranks in
order, and lets those of different pairs pass each other. On CUDA each channel has an NCCL group,
because NCCL runs all that two ranks exchange in a group on one stream, where a send would wait
for the receive before it.
"""

import pickle
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from penstock.comm.base import AbstractComm, Described, Transfer
from penstock.errors import CommError, DeadlineError, StageError
from penstock.ir import Rank
from penstock.ir.inputs import Channel

_TAG = 0
_TAG_OF_NO_MESSAGE = 1
_FAILURE = "failure"
# How long a rank whose connection broke looks for a report of why.
_REPORT_GRACE_S = 2.0


class ProcessGroupComm(AbstractComm):
    """This rank's ends of the channels of one pipeline, among the ranks of `group`.

    Every rank of the group must make one: they find each other by how many they have made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        channels: Iterable[Channel],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        store = group.get_group_store()
        number = store.add(f"penstock/made by rank {self.rank}", 1)
        self._store = distributed_c10d.PrefixStore(f"penstock/{number}", store)
        self._num_gathers = 0
        self._is_open = True
        # Before the groups are made, which would wait for ranks that never come.
        self.gather(None)
        self._gloo: Any = None
        self._nccl: dict[Channel, Any] = {}
        if device.type == "cpu":
            self._gloo = distributed_c10d.ProcessGroupGloo(
                distributed_c10d.PrefixStore("gloo", self._store),
                self.rank,
                self.num_ranks,
                self._timeout,
            )
        elif device.type == "cuda":
            options = distributed_c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            for channel in sorted(channels):
                if self.rank in channel:
                    prefix = distributed_c10d.PrefixStore(f"nccl {channel}", self._store)
                    self._nccl[channel] = distributed_c10d.ProcessGroupNCCL(
                        prefix, channel.index(self.rank), len(channel), options
                    )
        else:
            raise StageError(
                f"device is {device}, and there are no channels for {device.type}. "
                "Put the stages on cpu or cuda."
            )

    def gather(self, value: Any) -> list[Any]:
        """By way of the store: values are few and small, and their sizes differ."""
        keys = [f"gathered {self._num_gathers} from rank {rank}" for rank in range(self.num_ranks)]
        self._num_gathers += 1
        self._store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes too
        began_s = time.monotonic()
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as exc:
            absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            who = f"ranks {', '.join(absent)}" if len(absent) > 1 else f"rank {absent[0]}"
            awaited = f"{who} to begin a first step with the same pipeline"
            raise self._explain(exc, awaited, time.monotonic() - began_s) from exc
        return [pickle.loads(self._store.get(key)) for key in keys]

    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        if self._gloo is not None:
            return _WorkTransfer(self, self._gloo.send([tensor], receiver, _TAG))
        return _WorkTransfer(self, self._nccl[Channel(self.rank, receiver)].send([tensor], 1, _TAG))

    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        if self._gloo is not None:
            return _WorkTransfer(self, self._gloo.recv([tensor], sender, _TAG))
        return _WorkTransfer(self, self._nccl[Channel(sender, self.rank)].recv([tensor], 0, _TAG))

    def fail(self, report: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        # The first report stays: the others follow from it.
        self._store.compare_set(_FAILURE, "", f"rank {self.rank} failed: {report}")
        for group in self._nccl.values():
            group.abort()
        if self._gloo is not None and self.num_ranks > 1:
            # A receive that ends too late makes gloo close all connections of the group, at
            # which every rank that waits for this one wakes up. Nothing else does that for sure:
            # connections live as long as any transfer, and those are in tracebacks.
            try:
                other = (self.rank + 1) % self.num_ranks
                self._gloo.recv([torch.empty(1)], other, _TAG_OF_NO_MESSAGE).wait(
                    timedelta(milliseconds=1)
                )
            except RuntimeError:
                self._gloo = None

    def _explain(self, exc: Exception, awaited: str, waited_s: float) -> CommError:
        """Why a wait ended in an exception, in words."""
        if report := self._find_report(_REPORT_GRACE_S if waited_s < self._timeout_s else 0):
            return CommError(f"rank {self.rank} stopped waiting for {awaited}, because {report}")
        if waited_s >= self._timeout_s:
            return DeadlineError(
                f"rank {self.rank} waited {self._timeout_s:g} s for {awaited}, in vain. "
                "See what that rank was doing; if it only needed longer, give the pipeline a "
                "larger timeout."
            )
        return CommError(
            f"rank {self.rank} stopped waiting for {awaited}, because the connection was lost "
            f"({str(exc).splitlines()[0]}). The other process has ended without a word: "
            "look for it in the logs."
        )

    def _find_report(self, grace_s: float) -> str:
        """The first failure that any rank has reported, or nothing."""
        until_s = time.monotonic() + grace_s
        try:
            while not self._store.check([_FAILURE]):
                if time.monotonic() >= until_s:
                    return ""
                time.sleep(0.05)
            return self._store.get(_FAILURE).decode()
        except RuntimeError:  # The process that keeps the store has ended.
            return ""


class _WorkTransfer:
    __slots__ = ("_comm", "_work")

    def __init__(self, comm: ProcessGroupComm, work: dist.Work) -> None:
        self._comm, self._work = comm, work

    def wait(self, described: Described) -> None:
        began_s = time.monotonic()
        try:
            if self._comm._gloo is not None:
                self._work.wait(self._comm._timeout)
            else:
                # The stream waits; with a timeout the host would. NCCL keeps the deadline.
                self._work.wait()
        except RuntimeError as exc:
            waited_s = time.monotonic() - began_s
            raise self._comm._explain(exc, described(), waited_s) from exc
