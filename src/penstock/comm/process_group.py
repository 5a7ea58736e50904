"""Channels between the processes of a torch.distributed process group.

A pipeline opens its own connections, so giving up does not close anything that others use. The
medium depends on where the tensors are: shared memory between processes of one machine, gloo
between machines, NCCL between CUDA devices, and between other devices the backend that the process
group has for them.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from penstock.comm import shared_memory
from penstock.comm.abstract_comm import (
    BEGINNING,
    AbstractComm,
    AbstractLink,
    Describe,
    Transfer,
    Work,
    check_agreement,
)
from penstock.comm.channels import OpenChannels
from penstock.comm.failed_waits import Failures
from penstock.comm.links import (
    GlooLink,
    MakePair,
    PairLink,
    backend_for,
    backend_pair,
    nccl_pair,
)
from penstock.comm.plain_values import of_bytes, to_bytes
from penstock.comm.shared_memory import SharedMemoryLink
from penstock.comm.world_watch import watch_world
from penstock.errors import PipelineError
from penstock.ir import Rank
from penstock.ir.message import Channel
from penstock.watch.place import Place

_GAVE_UP = "gave up"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
"""Pauses between two looks into the store."""


class ProcessGroupComm(AbstractComm):
    """This rank's ends of the channels of one pipeline, among the ranks of `group`.

    Every rank of the group must make one; ranks match theirs by how many they have made.
    Set PENSTOCK_SHARED_MEMORY=0 to use gloo within a machine too.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self._group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._timeout_s = timeout_s
        store = group.get_group_store()
        made = f"penstock/made by rank {self.rank}"
        number = store.add(made, 1)
        self._store = distributed_c10d.PrefixStore(f"penstock/{number}", store)
        watch = watch_world()
        self.place = Place.unread() if watch is None else watch.place
        members = dist.get_process_group_ranks(group)
        self._failures = Failures(self._store, self.rank, timeout_s, watch, members)
        self._gathered: list[str] = []
        """The keys of what was gathered to connect."""
        self._num_gathers = 0
        self._is_open = True
        self._links: dict[Rank, AbstractLink] = {}
        self._channels = OpenChannels(self.rank)
        if watch is not None:
            watch.interrupting(self)
        try:
            self._open_links(device)
        except BaseException as exc:
            # The next attempt then matches that of a rank that missed this one.
            with contextlib.suppress(RuntimeError):
                store.add(made, -1)
                for key in self._gathered:
                    self._put(key, _GAVE_UP)
            self.close()
            if isinstance(exc, PipelineError) or not isinstance(exc, OSError | RuntimeError):
                raise
            raise self._failures.explain(exc, "a connection to each other rank", 0.0) from exc

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        """Exchange values through the store: they are few and small, and their sizes differ."""
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        keys = [f"gathered {number} from rank {rank}" for rank in range(self.num_ranks)]
        if not self._links:
            self._gathered.append(keys[self.rank])
        has_put = self._store.check([keys[self.rank]])  # In an attempt that it gave up.
        self._put(keys[self.rank], value)
        num_put = f"ranks in gather {number}"
        self._store.add(num_put, 0 if has_put else 1)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                self._wait_for_all(num_put, deadline_s)
                # One question for all: the process that keeps the store answers one at a time.
                texts = self._store.multi_get(keys)
            except (RuntimeError, TimeoutError) as exc:
                awaited = f"{self._name_absent(keys)} {what}"
                raise self._failures.explain(exc, awaited, self._timeout_s) from exc
            values = [of_bytes(text) for text in texts]
            if not any(isinstance(x, str) and x == _GAVE_UP for x in values):
                self._forget(number - 1)
                return values
            if time.monotonic() >= deadline_s:
                gone = [rank for rank, x in enumerate(values) if isinstance(x, str)]
                awaited = f"{_name(gone)} to begin a first step again, after giving up"
                raise self._failures.explain(TimeoutError(), awaited, self._timeout_s)
            time.sleep(0.05)

    def _forget(self, number: int) -> None:
        """Delete what this rank has put for a gather, which all ranks have left by now."""
        if number >= len(self._gathered):
            self._store.delete_key(f"gathered {number} from rank {self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"ranks in gather {number}")

    def _wait_for_all(self, count: str, deadline_s: float) -> None:
        """Wait until all ranks were counted; raise an error at the deadline, or if one is dead.

        The store's own wait cannot be interrupted.
        """
        pause_s = _SHORTEST_PAUSE_S
        while self._store.add(count, 0) < self.num_ranks:
            if time.monotonic() >= deadline_s or self._failures.find_dead():
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _name_absent(self, keys: list[str]) -> str:
        if self._failures.find_dead():  # The store may be out of reach.
            return "all ranks"
        with contextlib.suppress(RuntimeError):  # The process that keeps the store may have ended.
            return _name([r for r, key in enumerate(keys) if not self._store.check([key])])
        return "all ranks"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, to_bytes(value))  # type: ignore[arg-type]  # takes bytes too

    def open(self, channels: Iterable[Channel]) -> None:
        self._channels.open(channels, self._connect)

    def _connect(self, channel: Channel) -> None:
        other = channel.receiver if channel.sender == self.rank else channel.sender
        began_s = time.monotonic()
        try:
            self._links[other].connect(channel, self._timeout_s)
        except (OSError, RuntimeError) as exc:
            awaited = f"rank {other} to connect to rank {self.rank}"
            raise self._failures.explain(exc, awaited, time.monotonic() - began_s) from exc

    def copies(self, receiver: Rank) -> bool:
        return self._links[receiver].copies

    def packs(self, other: Rank) -> bool:
        return self._links[other].packs

    def needs_every_wait(self, other: Rank) -> bool:
        return self._links[other].needs_every_wait

    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        self._channels.check(self.rank, receiver)
        try:
            return _LinkTransfer(self, self._links[receiver].send(tensor))
        except (OSError, RuntimeError) as exc:
            raise self._failures.explain(exc, f"rank {receiver} to take a message", 0.0) from exc

    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        self._channels.check(sender, self.rank)
        try:
            return _LinkTransfer(self, self._links[sender].recv(tensor))
        except (OSError, RuntimeError) as exc:
            raise self._failures.explain(exc, f"a message from rank {sender}", 0.0) from exc

    def fail(self, report: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(RuntimeError):  # The process that keeps the store may have ended.
            # The first report stays: the others follow from it.
            self._failures.report(report)
        self.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def interrupt(self) -> None:
        """End all waits of this rank, as the watch has found a rank dead; any thread may call."""
        for link in list(self._links.values()):
            link.interrupt()

    def _open_links(self, device: torch.device) -> None:
        make_pair = None if device.type == "cpu" else self._pair_maker(device)
        machine = shared_memory.find_machine()
        if device.type != "cpu" or os.environ.get("PENSTOCK_SHARED_MEMORY") == "0":
            machine = ""
        listener = shared_memory.Listener() if machine else None
        gathered = self.gather((device.type, machine, listener.name if listener else b""))
        check_agreement([{"device": device_type} for device_type, _, _ in gathered])
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        if make_pair is not None:
            self._open_pairs(device, others, make_pair)
            return
        if listener is not None:
            names = {rank: gathered[rank][2] for rank in others if gathered[rank][1] == machine}
            self._open_shared_memory(listener, names)
        machines = {found for _, found, _ in gathered}
        if machines == {""} or len(machines) > 1:  # All ranks know it, and make the group.
            group = distributed_c10d.ProcessGroupGloo(
                distributed_c10d.PrefixStore("gloo", self._store),
                self.rank,
                self.num_ranks,
                timedelta(seconds=self._timeout_s),
            )
            for rank in others:
                self._links.setdefault(rank, GlooLink(group, rank))

    def _pair_maker(self, device: torch.device) -> MakePair:
        """Return what makes the group of a channel between accelerators."""
        if device.type == "cuda":
            return partial(nccl_pair, self._store, self.rank, self._timeout_s)
        backend = backend_for(self._group, device)
        return partial(backend_pair, self._store, self.rank, self._timeout_s, backend)

    def _open_pairs(
        self, device: torch.device, others: Iterable[Rank], make_pair: MakePair
    ) -> None:
        """Make links to all other ranks; their channels are connected when they are opened."""
        for other in others:
            self._links[other] = PairLink(self.rank, other, device, make_pair)

    def _open_shared_memory(
        self, listener: shared_memory.Listener, names: dict[Rank, bytes]
    ) -> None:
        """Make links to the processes that listen under these names; one of each pair connects."""
        backlogged: WeakSet[SharedMemoryLink] = WeakSet()
        deadline_s = time.monotonic() + self._timeout_s
        for rank, name in names.items():
            if rank < self.rank:
                connection = shared_memory.connect(name, self.rank, self._timeout_s)
                self._links[rank] = SharedMemoryLink(connection, backlogged)
        while missing := [rank for rank in names if rank not in self._links]:
            try:
                rank, connection = listener.accept(max(deadline_s - time.monotonic(), 0.001))
            except TimeoutError as exc:
                raise self._failures.explain(
                    exc, f"{_name(missing)} to connect", self._timeout_s
                ) from exc
            self._links[rank] = SharedMemoryLink(connection, backlogged)
        listener.close()


def _name(ranks: list[Rank]) -> str:
    """Return ranks in words: all ranks if the list is empty."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if ranks else "all ranks"


class _LinkTransfer:
    __slots__ = ("_comm", "_work")

    def __init__(self, comm: ProcessGroupComm, work: Work) -> None:
        self._comm, self._work = comm, work

    def wait(self, described: Describe) -> None:
        began_s = time.monotonic()
        try:
            self._work.wait(self._comm._timeout_s)
        except (OSError, RuntimeError) as exc:
            waited_s = time.monotonic() - began_s
            raise self._comm._failures.explain(exc, described(), waited_s) from exc
