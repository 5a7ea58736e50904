"""Bytes that are alive: as the accelerator's allocator counts them, or of watched operations.

The CPU's allocator does not count. There, every operation is watched while a stage runs, and each
storage that it makes counts as long as it is alive. Unlike hooks on what autograd saves, this does
not disturb the split backward. Such hooks are used for compiled stages, whose operations cannot be
watched; there, what the weight backward holds is noted by itself, and what an action needs only
while it runs is not seen.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.measuring.observer import Note, note_nothing
from penstock.stage import PipelineStage
from penstock.stage.dtensors import local_part
from penstock.torch_private import (
    StorageWeakRef,
    TorchDispatchMode,
    is_compiler_loaded,
    pytree,
    storage_address,
)


def live_bytes(device: torch.device) -> "AllocatedBytes | WatchedBytes":
    """Return a new count of the bytes that are alive on a device."""
    return WatchedBytes() if device.type == "cpu" else AllocatedBytes(device)


class AllocatedBytes:
    """Bytes as the accelerator's allocator counts them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def note(self, tensors: Any) -> None:
        """Do nothing: the allocator counts the tensors."""

    def counted(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of those tensors that `total` counts: all of them."""
        return num_bytes(tensors)

    def restart_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.max_memory_allocated(self._device)

    @contextmanager
    def watching(self, stage: PipelineStage, arguments: Any) -> Iterator[Note]:
        yield self.note

    def total(self) -> int:
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.memory_allocated(self._device)


class WatchedBytes:
    """Bytes of the storages that were noted and are still alive."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = self._peak = 0  # What may be alive now, and what was at the peak.

    def note(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is not None:
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's is untyped
                self._storages.setdefault(storage_address(storage), (weak, storage.nbytes()))
                self._at_most += storage.nbytes()
        if self._at_most > self._peak:  # Otherwise it is not worth looking for what was freed.
            self._peak = max(self._peak, self.total())

    def counted(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of those tensors that `total` counts: views of others may not be."""
        return num_bytes(t for t in tensors if not _addresses(t).isdisjoint(self._storages))

    def restart_peak(self) -> None:
        self._peak = self.total()

    def peak(self) -> int:
        return self._peak

    def total(self) -> int:
        self._storages = {
            key: (storage, num_bytes)
            for key, (storage, num_bytes) in self._storages.items()
            if not storage.expired()  # type: ignore[no-untyped-call]  # torch's is untyped
        }
        self._at_most = sum(num_bytes for _, num_bytes in self._storages.values())
        return self._at_most

    @contextmanager
    def watching(self, stage: PipelineStage, arguments: Any) -> Iterator[Note]:
        if not stage.is_compiled:
            with _without_compiling(), _Watch(self):
                yield note_nothing
            return
        given = [*stage.submod.parameters(), *stage.submod.buffers(), arguments]
        known = _addresses(given)

        def note(values: Any) -> None:
            self.note(value for value in pytree.tree_leaves(values) if _is_new(value, known))

        def pack(tensor: Tensor) -> Tensor:
            note(tensor)
            return tensor

        untraced = torch.compiler.disable(pack)  # type: ignore[no-untyped-call]  # torch's is
        with torch.autograd.graph.saved_tensors_hooks(untraced, _as_it_is):
            yield note


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """A mode that notes the storages that operations make; views and in-place results make none."""

    supports_higher_order_operators = True

    def __init__(self, watched: WatchedBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._watched = watched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        known = _addresses((args, kwargs))
        self._watched.note(x for x in pytree.tree_leaves(results) if _is_new(x, known))
        return results


def _without_compiling() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run uncompiled.

    Where operations are watched, torch.compile would give up on these functions for good.
    """
    if not is_compiler_loaded():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _addresses(values: Any) -> set[int]:
    """Return the addresses of the storages of all tensors in a nested value."""
    found = map(_storage_of, pytree.tree_leaves(values))
    return {storage_address(storage) for storage in found if storage is not None}


def _is_new(value: Any, known: set[int]) -> bool:
    storage = _storage_of(value)
    return storage is not None and storage_address(storage) not in known


def _storage_of(value: Any) -> torch.UntypedStorage | None:
    """Return the storage of a dense tensor; None for anything else."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return None
    try:
        return local_part(value).untyped_storage()
    except (NotImplementedError, RuntimeError):  # A tensor that only wraps others has none.
        return None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors, counting each storage once."""
    found = (storage for tensor in tensors if (storage := _storage_of(tensor)) is not None)
    return sum({storage_address(storage): storage.nbytes() for storage in found}.values())
