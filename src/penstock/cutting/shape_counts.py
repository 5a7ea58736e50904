"""Counts of the operations and bytes of a forward, on tensors without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.cutting.own_backwards import ONE_AT_A_TIME
from penstock.errors import CostError
from penstock.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

# A forward and the two halves of its backward do about the same work.
_PASSES = 3
# The number of operations that a machine does in the time in which it handles a byte that it keeps.
# It decides how much losses count, and layers that hardly compute.
_OPERATIONS_PER_BYTE = {"cpu": 5, "accelerator": 300}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer for one microbatch."""

    name: str
    time: float
    """The time of forward and backward: seconds if measured, operations if counted."""
    parameter_bytes: float
    activation_bytes: float
    """The bytes that its forward holds for its backward."""
    backward_bytes: float = 0.0
    """The bytes that its backward needs on top while it runs; only those of a loss are counted."""


def counted(name: str, operations: int, kept: int, parameter_bytes: int) -> LayerCost:
    """Return the cost of a layer with these counts for one forward."""
    machine = "accelerator" if torch.accelerator.is_available() else "cpu"
    work = _PASSES * (operations + _OPERATIONS_PER_BYTE[machine] * kept)
    return LayerCost(name, work, parameter_bytes, kept)


class Counter:
    """Counts of operations and of bytes held for a backward, on tensors without values."""

    def __init__(self, mode: FakeTensorMode, operations: FlopCounterMode, saved: "Saved") -> None:
        self._mode = mode
        self._operations = operations
        self._saved = saved
        self._taken = 0, 0

    def take(self) -> tuple[int, int]:
        """Return the operations and bytes since the last call."""
        now = self._operations.get_total_flops(), self._saved.num_bytes
        before, self._taken = self._taken, now
        return now[0] - before[0], now[1] - before[1]

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor as held: something else holds it anyway."""
        self._saved.leave_out(tensor)

    def fake_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor without values for one of the model; it is not counted as held."""
        fake: Tensor = self._mode.from_tensor(tensor)
        if tensor.is_meta:
            fake = torch.empty_like(fake, device="cpu", requires_grad=tensor.requires_grad)
        self.leave_out(fake)
        return fake


@contextmanager
def counting() -> Iterator[Counter]:
    """Count what runs in the context, in which tensors have no values."""
    try:
        with (
            ONE_AT_A_TIME,
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            FlopCounterMode(display=False) as operations,
            counting_saved() as saved,
        ):
            yield Counter(mode, operations, saved)
    except (DataDependentOutputException, DynamicOutputShapeException) as exc:
        raise CostError(
            f"costs cannot be counted from shapes: the result of {exc.func} depends on the values "
            "of its input. Give the costs: penstock.Balanced(num_stages, costs=…), with the "
            "result of penstock.measure_layers() or one number per layer."
        ) from exc


def fake_like(tensor: Tensor, *, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the current mode, without values; on the CPU for one on meta.

    On the meta device, operations such as attention compute and keep what they do nowhere else.
    """
    device = device or torch.device("cpu" if tensor.is_meta else tensor.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class Saved:
    """The bytes held for a backward, counting each storage once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[torch.UntypedStorage] = set()

    def leave_out(self, tensor: Tensor) -> None:
        self._seen.add(tensor.untyped_storage())

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.num_bytes += storage.nbytes()
        return tensor


@contextmanager
def counting_saved() -> Iterator[Saved]:
    """Count the bytes that forwards in the context hold for their backwards."""
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved
