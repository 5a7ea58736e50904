"""Snapshots of a rank's tensors in memory that outlives the rank.

    write(10)  fill copy 0   [background: checksum, done]
    write(20)  all ranks are done with 10; fill copy 1 …
    write(30)  all ranks are done with 20; fill copy 0, which had 10

So the last snapshot of all ranks is never overwritten, and a rank has two copies at most. After a
restart, what was loaded stays as a third, until all ranks have a new one. If the ranks are on
several machines, each copy is there twice: here, and on another one.
"""

import json
import logging
import mmap
import os
import secrets
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.comm.world_watch import address_among_ranks
from penstock.errors import CheckpointError
from penstock.snapshots.keeper_client import Entry, KeeperClient, newest_complete
from penstock.snapshots.neighbour import Address, CopyServer, fetch_copy, neighbours, put_copy
from penstock.torch_private import is_dtensor

LOGGER = logging.getLogger("penstock")

Gather: TypeAlias = Callable[[Any, str], list[Any]]
"""Returns the values of all ranks; the text says what they wait for."""

_WHAT = "to keep a snapshot"
_ALIGNED = 64
_COPIES = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a snapshot."""

    rank: int
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that can be loaded: the parts of it that this machine has."""

    step: int
    num_ranks: int
    parts: tuple[Part, ...]


class KeptState:
    """The snapshots of a rank's tensors, in memory that this machine's keeper holds.

    All ranks make one and call the same methods. `gather` gathers values from all of them, such as
    `Pipeline.gather`. The keeper ends with the launcher that has started this process.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._launcher = os.getppid()
        self._keeper = KeeperClient(self._launcher)
        own = uuid.uuid4().hex
        names, homes, tokens = zip(
            *gather((own, self._keeper.name, secrets.token_hex(16)), _WHAT), strict=True
        )
        self._attempt, self.rank, self.num_ranks = str(names[0]), names.index(own), len(names)
        self._secret = str(tokens[0])
        self._neighbour = neighbours(homes)[self.rank]
        self._server: CopyServer | None = None
        self._addresses: Sequence[Address | None] = [None] * self.num_ranks
        if len(set(homes)) > 1:
            self._meet_neighbours()
        self._copies: list[mmap.mmap | None] = [None] * _COPIES
        self._num_written = 0
        self._closing: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def write(self, step: int, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Copy tensors, and values that JSON can hold; the rest happens in the background."""
        self._finish()
        self._gather(None, _WHAT)  # All have the previous one, so the one before is free.
        if self._num_written == 1:  # All have one of this attempt, so no other is needed.
            self._keeper.ask("forget", attempt=self._attempt, rank=None, step=None)
        copy = self._num_written % _COPIES
        header, size, places = _lay_out(tensors, extra)
        key = (self._attempt, self.rank, copy)
        memory = self._copies[copy] = self._keeper.make_memory(self._copies[copy], size, *key)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        flat[8 : 8 + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        memory[:8] = len(header).to_bytes(8, "little")
        for name, (start, end) in places.items():
            value = tensors[name].detach()
            flat[start:end].view(value.dtype).view(value.shape).copy_(value)
        del flat
        about = {"step": step, "ranks": self.num_ranks, "bytes": size}
        self._closing = threading.Thread(target=self._complete, args=(memory, copy, about))
        self._closing.start()
        self._num_written += 1

    def read(self) -> Snapshot | None:
        """Return the newest snapshot that all ranks have had, or None; then only that is kept.

        It has the parts that this machine has, and those from others that this rank needs: its
        own, or all if the number of ranks has changed.
        """
        self._finish()
        own = self._keeper.entries()
        rows = [[Entry(*each) for each in row] for row in self._gather(own, _WHAT)]
        newest = newest_complete([entry for row in rows for entry in row])
        if newest is None:
            return None
        attempt, step = newest
        rows = [
            [e for e in row if e.attempt == attempt and e.about["step"] == step] for row in rows
        ]
        num_ranks = next(entry for row in rows for entry in row).about["ranks"]
        parts = {entry.rank: _open(entry, self._keeper.map(entry)) for entry in rows[self.rank]}
        for rank in [self.rank] if num_ranks == self.num_ranks else range(num_ranks):
            if rank not in parts:
                parts[rank] = self._fetch(rank, rows)
        self._gather(None, _WHAT)  # Before anything is dropped.
        self._keeper.ask("forget", attempt=attempt, rank=None, step=step)
        self._copies = [None] * _COPIES  # The keeper may have dropped them.
        if self._server is not None:
            self._server.copies.clear()
        return Snapshot(step, num_ranks, tuple(parts.values()))

    def close(self) -> None:
        """Drop all that is kept for this rank, at the end of a training."""
        self._finish()
        self._gather(None, _WHAT)  # All have reached the end.
        ranks = [self.rank]
        if self._server is not None:
            self._server.close()
            ranks += {rank for _, rank, _ in self._server.copies}
        for rank in ranks:
            self._keeper.ask("forget", attempt=self._attempt, rank=rank, step=None)
        self._keeper.ask("forget", attempt=self._attempt, rank=None, step=None)
        self._keeper.close()

    def _meet_neighbours(self) -> None:
        """Listen for ranks of other machines, and learn where they listen."""
        try:
            self._server = CopyServer(address_among_ranks(), self._secret, self._launcher)
        except OSError as error:
            LOGGER.warning("rank %d keeps no copies for other machines: %s.", self.rank, error)
        own = None if self._server is None else self._server.address
        found = self._gather(own, _WHAT)
        self._addresses = [None if each is None else Address(*each) for each in found]

    def _complete(self, memory: mmap.mmap, copy: int, about: Mapping[str, Any]) -> None:
        """Let the keeper know of a snapshot, and another machine keep a copy."""
        try:
            checked = {**about, "checksum": zlib.crc32(memory)}
            self._keeper.complete(self._attempt, self.rank, copy, checked)
        except CheckpointError as error:
            self._error = error
            return
        address = None if self._neighbour is None else self._addresses[self._neighbour]
        if address is None:
            return
        key = {"attempt": self._attempt, "rank": self.rank, "copy": copy}
        try:
            put_copy(address, self._secret, key, checked, memory)
        except OSError as error:
            LOGGER.warning(
                "rank %d: the snapshot of step %d has no copy on another machine, because rank %d "
                "at %s does not keep it: %s.",
                *(self.rank, about["step"], self._neighbour, address.host, error),
            )

    def _finish(self) -> None:
        """Wait until the previous snapshot is complete."""
        if self._closing is not None:
            self._closing.join()
            self._closing = None
        if self._error is not None:
            raise self._error

    def _fetch(self, rank: int, rows: Sequence[Sequence[Entry]]) -> Part:
        """Return the part of a rank from another machine."""
        holders = [
            (address, entry)
            for address, row in zip(self._addresses, rows, strict=True)
            for entry in row
            if entry.rank == rank and address is not None
        ]
        if not holders:
            raise CheckpointError(
                f"rank {self.rank} needs rank {rank}'s part of the last snapshot, which is on "
                "another machine, and no rank there can be reached. Expected an address for each "
                "of them, see GLOO_SOCKET_IFNAME: go on from a checkpoint."
            )
        address, entry = holders[0]
        return _open(entry, fetch_copy(address, self._secret, entry))


def _open(entry: Entry, memory: mmap.mmap) -> Part:
    """Return a rank's part of a snapshot, whose tensors are in the memory."""
    if zlib.crc32(memory) != entry.about["checksum"]:
        raise CheckpointError(
            f"rank {entry.rank}'s part of the snapshot of step {entry.about['step']} is "
            "damaged. Expected the bytes that it was made of: go on from a checkpoint."
        )
    length = int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8 : 8 + length])
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = {
        name: flat[start:end].view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, start, end) in header["tensors"].items()
    }
    return Part(entry.rank, tensors, header["extra"])


def _lay_out(
    tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> tuple[bytes, int, dict[str, tuple[int, int]]]:
    """Return the header, the size of the whole, and the place of each tensor in it."""
    for name, value in tensors.items():
        if is_dtensor(value):
            raise CheckpointError(
                f"{name!r} is spread over ranks as a DTensor. Expected plain tensors: give its "
                "local part, to_local(), and fill that of the same rank again."
            )
    sizes = {name: value.numel() * value.element_size() for name, value in tensors.items()}
    # Room for the header, whose length depends on places: numbers of 15 digits at most.
    form = {name: [str(v.dtype)[6:], list(v.shape)] for name, v in tensors.items()}
    try:
        room = len(json.dumps({"tensors": form, "extra": dict(extra)})) + 40 * (len(form) + 1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra, or a setting of the optimizer, cannot be kept: {error}. Expected numbers, "
            "texts, lists and dicts of them."
        ) from error
    start = _aligned(8 + room)
    places: dict[str, tuple[int, int]] = {}
    for name, size in sizes.items():
        places[name] = start, start + size
        start = _aligned(start + size)
    described = {name: [*form[name], *places[name]] for name in form}
    header = json.dumps({"tensors": described, "extra": dict(extra)}).encode()
    return header, max(start, _ALIGNED), places


def _aligned(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED
