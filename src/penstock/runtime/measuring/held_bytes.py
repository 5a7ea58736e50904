"""Count the bytes that microbatches hold from one action to the next, and what actions need.

An accelerator's allocator knows them. The CPU's does not: there, every operation is watched while
a stage runs, and each storage that it makes counts as long as it is alive. Unlike hooks on what
autograd saves, this does not disturb the split backward. Such hooks are used for compiled stages,
whose operations cannot be watched; there, what the weight backward holds is noted by itself, and
what an action needs only while it runs is not seen.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.ir import Backward, BackwardInput, Forward, Message, MicrobatchId, StageId
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
from penstock.stage.dtensors import copy_with_spread, local_part
from penstock.torch_private import (
    StorageWeakRef,
    TorchDispatchMode,
    is_compiler_loaded,
    pytree,
    storage_address,
)


class HeldBytes(AbstractMemoryCount):
    """The bytes that the microbatches of one rank hold in a step, one number per microbatch.

    Stages of one rank share what they hand over. While bytes are counted, each works with its own
    copy, so that it is clear which stage keeps what alive.
    """

    def __init__(self, device: torch.device) -> None:
        self.after_forward: defaultdict[StageId, list[int]] = defaultdict(list)
        self.after_input: defaultdict[StageId, list[int]] = defaultdict(list)
        self.during: defaultdict[tuple[type, StageId], list[int]] = defaultdict(list)
        """By kind and stage: the most beyond what the rank held before the action."""
        self._live = _Watched() if device.type == "cpu" else _Allocated(device)
        self._before = self._copied = self._made_grads = 0
        self._held: dict[tuple[StageId, MicrobatchId], int] = {}

    def begin(self, flow: Dataflow) -> None:
        self._flow = flow

    def take_over(self, leaves: Leaves) -> Leaves:
        return _copied(leaves)

    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        """Count what arrived as the action's own.

        Activations from another stage of this rank are copies of the output that it holds. They
        count only once that stage may have released its output.
        """
        tensors = _tensors(leaves)
        self._live.note(tensors)
        self._before = self._live.total() - _num_bytes(tensors)
        self._copied = _num_bytes(
            tensor
            for message, row in zip(messages, leaves, strict=True)
            if not message.is_gradient and not self._flow.is_sent(message)
            for tensor in _tensors(row)
        )
        self._made_grads = 0
        self._live.restart_peak()

    @contextmanager
    def watching(self, stage: PipelineStage, arguments: Any) -> Iterator[Note]:
        before = _num_bytes(_grads(stage))
        with self._live.watching(stage, arguments) as note:
            yield note
        # The first backward makes the gradients of weights, which stay.
        self._made_grads += max(0, _num_bytes(_grads(stage)) - before)

    def computed(self, task: Task, step: StepView) -> None:
        action = task.action
        place = action.stage, action.mb
        besides = self._before + self._copied + self._made_grads
        self.during[type(action), action.stage].append(max(0, self._live.peak() - besides))
        if isinstance(action, Forward):
            self._held[place] = self._live.total() - self._before
            self.after_forward[action.stage].append(max(0, self._held[place] - self._copied))
        elif isinstance(action, BackwardInput):
            for leaves in step.made_by(task):
                # Pass copies on, so that what is still alive is what the weight backward holds.
                leaves[:] = _copied(leaves)
            tensors = _tensors((step.made_by(task), step.kept_of(task)))
            self._live.note(tensors)
            change = self._live.total() - self._before - _num_bytes(tensors)
            self.after_input[action.stage].append(max(0, self._held.pop(place) + change))
        elif isinstance(action, Backward):
            del self._held[place]


class _Allocated:
    """Bytes as the accelerator's allocator counts them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def note(self, tensors: Any) -> None:
        """Do nothing: the allocator counts the tensors."""

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


class _Watched:
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

    def __init__(self, watched: _Watched) -> None:
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


def _grads(stage: PipelineStage) -> Iterator[Tensor]:
    grads = (parameter.grad for parameter in stage.submod.parameters())
    return (grad for grad in grads if grad is not None)


def _copied(leaves: Leaves) -> Leaves:
    return [copy_with_spread(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _tensors(values: Any) -> list[Tensor]:
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


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors, counting each storage once."""
    found = (storage for tensor in tensors if (storage := _storage_of(tensor)) is not None)
    return sum({storage_address(storage): storage.nbytes() for storage in found}.values())
