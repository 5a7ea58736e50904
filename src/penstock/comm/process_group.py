"""Channels between processes that torch.distributed has brought together.

A pipeline opens connections of its own, so giving up closes nothing that anyone else uses. What
carries them depends on where the tensors are: shared memory between processes of one machine,
gloo between machines, NCCL between CUDA devices.
"""

import contextlib
import os
import pickle
import time
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from penstock.comm import shared_memory
from penstock.comm.base import AbstractComm, Described, Link, Transfer, Work
from penstock.comm.links import GlooLink, NcclLink
from penstock.comm.shared_memory import SharedMemoryLink
from penstock.errors import CommError, DeadlineError, StageError
from penstock.ir import Rank

_FAILURE = "failure"
# How long a rank whose connection broke looks for a report of why.
_REPORT_GRACE_S = 2.0


class ProcessGroupComm(AbstractComm):
    """This rank's ends of the channels of one pipeline, among the ranks of `group`.

    Every rank of the group must make one: they find each other by how many they have made.
    Set PENSTOCK_SHARED_MEMORY=0 to use gloo within a machine too.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._timeout_s = timeout_s
        store = group.get_group_store()
        made = f"penstock/made by rank {self.rank}"
        number = store.add(made, 1)
        self._store = distributed_c10d.PrefixStore(f"penstock/{number}", store)
        self._num_gathers = 0
        self._is_open = True
        self._links: dict[Rank, Link] = {}
        try:
            self._open_links(device)
        except (OSError, RuntimeError) as exc:
            store.add(made, -1)  # The next attempt meets that of a rank which missed this one.
            if isinstance(exc, CommError):
                raise
            raise self._explain(exc, "a connection to each other rank", 0.0) from exc

    def gather(self, value: Any) -> list[Any]:
        """By way of the store: values are few and small, and their sizes differ."""
        keys = [f"gathered {self._num_gathers} from rank {rank}" for rank in range(self.num_ranks)]
        self._num_gathers += 1
        pickled = pickle.dumps(value)
        self._store.set(keys[self.rank], pickled)  # type: ignore[arg-type]  # takes bytes too
        began_s = time.monotonic()
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as exc:
            absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            self._store.delete_key(keys[self.rank])  # Who comes later finds nobody waiting.
            who = f"ranks {', '.join(absent)}" if len(absent) > 1 else f"rank {absent[0]}"
            awaited = f"{who} to begin a first step with the same pipeline"
            raise self._explain(exc, awaited, time.monotonic() - began_s) from exc
        return [pickle.loads(self._store.get(key)) for key in keys]

    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        try:
            return _LinkTransfer(self, self._links[receiver].send(tensor))
        except (OSError, RuntimeError) as exc:
            raise self._explain(exc, f"rank {receiver} to take a message", 0.0) from exc

    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        try:
            return _LinkTransfer(self, self._links[sender].recv(tensor))
        except (OSError, RuntimeError) as exc:
            raise self._explain(exc, f"a message from rank {sender}", 0.0) from exc

    def fail(self, report: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(RuntimeError):  # The process that keeps the store may have ended.
            # The first report stays: the others follow from it.
            self._store.compare_set(_FAILURE, "", f"rank {self.rank} failed: {report}")
        for link in self._links.values():
            link.close()

    def _open_links(self, device: torch.device) -> None:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        if device.type == "cuda":
            self.gather(None)  # Or a rank that never comes would be NCCL's to tell.
            # In the order of pairs, so that no two ranks wait for each other.
            for other in others:
                self._links[other] = NcclLink(self._store, self.rank, other, self._timeout_s)
        elif device.type == "cpu":
            self._open_cpu_links(others)
        else:
            raise StageError(
                f"device is {device}, and there are no channels for {device.type}. "
                "Put the stages on cpu or cuda."
            )

    def _open_cpu_links(self, others: list[Rank]) -> None:
        machine = shared_memory.find_machine()
        if os.environ.get("PENSTOCK_SHARED_MEMORY") == "0":
            machine = ""
        listener = shared_memory.Listener() if machine else None
        addresses = self.gather((machine, listener.name if listener else b""))
        if listener is not None:
            near = [rank for rank in others if addresses[rank][0] == machine]
            sockets = {
                rank: shared_memory.connect(addresses[rank][1], self.rank, self._timeout_s)
                for rank in near
                if rank < self.rank
            }
            while len(sockets) < len(near):
                rank, connection = listener.accept(self._timeout_s)
                sockets[rank] = connection
            listener.close()
            family: WeakSet[SharedMemoryLink] = WeakSet()
            for rank, connection in sockets.items():
                self._links[rank] = SharedMemoryLink(connection, family)
        machines = {machine for machine, _ in addresses}
        if machines == {""} or len(machines) > 1:  # All ranks know it, so all make the group.
            group = distributed_c10d.ProcessGroupGloo(
                distributed_c10d.PrefixStore("gloo", self._store),
                self.rank,
                self.num_ranks,
                timedelta(seconds=self._timeout_s),
            )
            for rank in others:
                self._links.setdefault(rank, GlooLink(group, rank))

    def _explain(self, exc: Exception, awaited: str, waited_s: float) -> CommError:
        """Why a wait ended in an exception, in words."""
        is_late = waited_s >= 0.99 * self._timeout_s
        if report := self._find_report(0.0 if is_late else _REPORT_GRACE_S):
            return CommError(f"rank {self.rank} stopped waiting for {awaited}, because {report}")
        if is_late:
            return DeadlineError(
                f"rank {self.rank} waited {self._timeout_s:g} s for {awaited}, in vain. "
                "See what that rank was doing; if it only needed longer, give the pipeline a "
                "larger timeout."
            )
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        return CommError(
            f"rank {self.rank} stopped waiting for {awaited}, because the connection was lost "
            f"({reason}). The other process has ended without a word: look for it in the logs."
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


class _LinkTransfer:
    __slots__ = ("_comm", "_work")

    def __init__(self, comm: ProcessGroupComm, work: Work) -> None:
        self._comm, self._work = comm, work

    def wait(self, described: Described) -> None:
        began_s = time.monotonic()
        try:
            self._work.wait(self._comm._timeout_s)
        except (OSError, RuntimeError) as exc:
            waited_s = time.monotonic() - began_s
            raise self._comm._explain(exc, described(), waited_s) from exc
