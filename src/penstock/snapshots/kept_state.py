"""Snapshots of a rank's tensors in memory that outlives the rank.

    write(10)  fill copy 0   [background: checksum, done]
    write(20)  all ranks are done with 10; fill copy 1 …
    write(30)  all ranks are done with 20; fill copy 0, which had 10

So the last snapshot of all ranks is never overwritten, and a rank has two copies at most. After a
restart, what was loaded stays as a third, until all ranks have a new one.
"""

import json
import mmap
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.snapshots.keeper_client import Entry, KeeperClient, newest_complete
from penstock.torch_private import is_dtensor

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
        self._keeper = KeeperClient(os.getppid())
        own = uuid.uuid4().hex
        names = gather(own, _WHAT)
        self._attempt, self.rank, self.num_ranks = str(names[0]), names.index(own), len(names)
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
        key: dict[str, Any] = {"attempt": self._attempt, "rank": self.rank, "copy": copy}
        memory = self._memory(copy, size, key)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        flat[8 : 8 + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        memory[:8] = len(header).to_bytes(8, "little")
        for name, (start, end) in places.items():
            value = tensors[name].detach()
            flat[start:end].view(value.dtype).view(value.shape).copy_(value)
        del flat
        about = {"step": step, "ranks": self.num_ranks, "bytes": size}
        self._closing = threading.Thread(target=self._complete, args=(memory, key, about))
        self._closing.start()
        self._num_written += 1

    def read(self) -> Snapshot | None:
        """Return the newest snapshot that all ranks have had, or None; then only that is kept."""
        own = self._keeper.entries()
        found = {Entry(*each)[:3]: Entry(*each) for row in self._gather(own, _WHAT) for each in row}
        newest = newest_complete(list(found.values()))
        if newest is None:
            return None
        attempt, step = newest
        here = [each for each in own if each.attempt == attempt and each.about["step"] == step]
        parts = tuple(self._fetch(entry) for entry in here)
        self._gather(None, _WHAT)  # Before anything is dropped.
        self._keeper.ask("forget", attempt=attempt, rank=None, step=step)
        return Snapshot(step, here[0].about["ranks"] if here else 0, parts)

    def close(self) -> None:
        """Drop all that is kept for this rank, at the end of a training."""
        self._finish()
        self._gather(None, _WHAT)  # All have reached the end.
        self._keeper.ask("forget", attempt=self._attempt, rank=self.rank, step=None)
        self._keeper.ask("forget", attempt=self._attempt, rank=None, step=None)
        self._keeper.close()

    def _memory(self, copy: int, size: int, key: Mapping[str, Any]) -> mmap.mmap:
        """Return the memory of a copy, which the keeper knows is not complete now."""
        memory = self._copies[copy]
        if memory is not None and len(memory) == size:
            self._keeper.ask("begin", **key)
            return memory
        number = os.memfd_create("penstock-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(number, size)
            memory = mmap.mmap(number, size)
            self._keeper.ask("keep", given=number, **key)
        finally:
            os.close(number)
        self._copies[copy] = memory
        return memory

    def _complete(
        self, memory: mmap.mmap, key: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        try:
            checked = {**about, "checksum": zlib.crc32(memory)}
            self._keeper.ask("done", **key, about=checked)
        except CheckpointError as error:
            self._error = error

    def _finish(self) -> None:
        """Wait until the previous snapshot is complete."""
        if self._closing is not None:
            self._closing.join()
            self._closing = None
        if self._error is not None:
            raise self._error

    def _fetch(self, entry: Entry) -> Part:
        key: dict[str, Any] = {"attempt": entry.attempt, "rank": entry.rank, "copy": entry.copy}
        _, [number] = self._keeper.ask("fetch", **key)
        try:
            memory = mmap.mmap(number, entry.about["bytes"])
        finally:
            os.close(number)
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
                f"{name!r} is spread over ranks as a DTensor. Expected plain tensors: snapshots in "
                "memory do not keep shards. Save to a folder instead."
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
