"""Bytes that are alive in a step without values, counted by the deaths of their storages."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ir import Message
from penstock.ir.dataflow import Dataflow
from penstock.runtime.measuring.observer import (
    AbstractMemoryCount,
    Leaves,
    Note,
    StepView,
    note_nothing,
)
from penstock.runtime.program import Task
from penstock.stage import PipelineStage
from penstock.torch_private import TorchDispatchMode, storage_address


class LiveStorages:
    """The bytes of storages from when they are noted until nothing holds them.

    torch keeps one Python object for each storage as long as it is alive, so a weak reference to
    it tells when memory would be freed. That takes the same time however many there are; looking
    through all of them, as `WatchedBytes` does, would take too long for a thousand microbatches.
    """

    def __init__(self) -> None:
        self.total = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is known already."""
        storage = tensor.untyped_storage()
        self._add(storage, storage.nbytes())

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor, nor views of it."""
        self._add(tensor.untyped_storage(), 0)

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        address = storage_address(storage)
        if address not in self._known:
            self._known[address] = weakref.ref(storage, partial(self._free, address, num_bytes))
            self.total += num_bytes
            self.peak = max(self.peak, self.total)

    def _free(self, address: int, num_bytes: int, reference: object) -> None:
        del self._known[address]
        self.total -= num_bytes


class NotingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """A mode that notes the storages that operations make."""

    supports_higher_order_operators = True

    def __init__(self, live: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self._live.note(result)
        return results


class StepMemory(AbstractMemoryCount):
    """The most that a rank holds in a step, with the gradients of weights and without."""

    def __init__(self, live: LiveStorages, modules: Sequence[nn.Module]) -> None:
        self.most = self.most_without_grads = 0
        self._live = live
        self._parameters = list(
            dict.fromkeys(
                parameter
                for module in modules
                for parameter in module.parameters()
                if parameter.requires_grad
            )
        )

    @property
    def grad_bytes(self) -> int:
        """The bytes of the gradients of weights, as far as there are any yet."""
        return sum(grad.nbytes for grad in self._grads())

    def _grads(self) -> Iterator[Tensor]:
        return (parameter.grad for parameter in self._parameters if parameter.grad is not None)

    def begin(self, flow: Dataflow) -> None:
        self._live.peak = self._live.total

    def take_over(self, leaves: Leaves) -> Leaves:
        return leaves

    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        """Do nothing: messages count from when they are posted."""

    def watching(self, stage: PipelineStage, arguments: Any) -> AbstractContextManager[Note]:
        return _WATCHED_ALREADY

    def computed(self, task: Task, step: StepView) -> None:
        self.most = max(self.most, self._live.peak)
        self.most_without_grads = max(self.most_without_grads, self._live.peak - self.grad_bytes)
        self._live.peak = self._live.total


_WATCHED_ALREADY: AbstractContextManager[Note] = nullcontext(note_nothing)
