"""Parameters, buffers and optimizer states that move to the ranks of their new stages.

    all ranks   say what they hold [1]   check [2]   exchange what moves [3]   put it in place [4]

Everything goes by the names of the model, which are the same for every cut. A parameter that stays
on its rank stays the same object.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.ir import Rank

Exchange: TypeAlias = Callable[[list[tuple[Rank, Tensor]], list[tuple[Rank, Tensor]]], None]
"""Sends tensors to ranks, and fills others from ranks, in the order of both ends."""


class Form(NamedTuple):
    """What it takes to make room for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool
    """True if it stays on the host, as the step counts of optimizers do."""

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> "Form":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type != device.type)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor of a rank, and what belongs to it."""

    parts: dict[str, Form]
    """Its value, its gradient and its states, as far as they are tensors, by their kinds."""
    is_trained: bool
    group: int | None
    """The number of its group in the optimizer."""
    plain: dict[str, Any] = field(default_factory=dict)
    """States that are not tensors."""


class HeldTensors:
    """The tensors of this rank's stages, by their names in the model."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self._optimizer = optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self.tensors: dict[str, Tensor] = {}
        for module in modules:
            for name, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ):
                self.tensors.setdefault(name, tensor)
        if strange := self._groups.keys() - set(self.tensors.values()):
            raise PartitionError(
                f"the optimizer has {len(strange)} parameters that are not of this rank's stages. "
                "Expected the optimizer of this model: make it with pipe.parameters()."
            )

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return a tensor with what belongs to it: its gradient and its states."""
        tensor = self.tensors[name]
        found = {"value": tensor.detach()}
        if tensor.grad is not None:
            found["grad"] = tensor.grad
        states = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        return found | {f"state.{k}": v for k, v in states.items() if isinstance(v, Tensor)}

    def describe(self) -> dict[str, Holding]:
        """Say what this rank holds [1]."""
        return {name: self._holding(name) for name in self.tensors}

    def _holding(self, name: str) -> Holding:
        tensor = self.tensors[name]
        states = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        return Holding(
            {kind: Form.of(part, self._device) for kind, part in self.parts(name).items()},
            tensor.requires_grad,
            self._groups.get(tensor),
            {kind: state for kind, state in states.items() if not isinstance(state, Tensor)},
        )

    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the kind of the optimizer, and the settings of its groups."""
        if self._optimizer is None:
            return "none", []
        groups = [
            {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for group in self._optimizer.param_groups
        ]
        return type(self._optimizer).__name__, groups


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor in its new stage, and what belongs to it."""

    tensor: Tensor
    group: int | None
    states: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Moving:
    """The way of all tensors from the old stages to the new ones."""

    rank: Rank
    device: torch.device
    held: HeldTensors
    holdings: Sequence[Mapping[str, Holding]]
    """What each rank holds."""
    wanted: Sequence[Sequence[str]]
    """The names that each rank will hold."""

    def check(self) -> None:
        """Raise an error for a tensor that no rank holds [2]."""
        known = {name for holding in self.holdings for name in holding}
        if missing := sorted({name for names in self.wanted for name in names} - known):
            raise PartitionError(
                f"no rank holds {missing[0]!r}, which a stage of the new cut needs. Expected the "
                "modules that parallelize() made: modules of a stage were replaced."
            )

    def run(self, exchange: Exchange) -> dict[str, Moved]:
        """Exchange what moves; return what this rank holds from now on [3]."""
        sent: list[tuple[Rank, Tensor]] = []
        for rank, names in enumerate(self.wanted):
            for name in names:
                if rank != self.rank and self._source(name, rank) == self.rank:
                    parts = self.held.parts(name).values()
                    sent += [(rank, p.to(self.device).contiguous()) for p in parts if p.numel()]
        received: list[tuple[Rank, Tensor]] = []
        arrived: dict[str, dict[str, Tensor]] = {}
        for name in self.wanted[self.rank]:
            source = self._source(name, self.rank)
            if source != self.rank:
                forms = self.holdings[source][name].parts
                arrived[name] = {kind: form.empty(self.device) for kind, form in forms.items()}
                received += [(source, part) for part in arrived[name].values() if part.numel()]
        exchange(sent, received)
        return {name: self._moved(name, arrived.get(name)) for name in self.wanted[self.rank]}

    def _source(self, name: str, rank: Rank) -> Rank:
        """Return the rank that a tensor comes from: the same, if it holds it already."""
        if name in self.holdings[rank]:
            return rank
        return next(r for r, holding in enumerate(self.holdings) if name in holding)

    def _moved(self, name: str, parts: Mapping[str, Tensor] | None) -> Moved:
        holding = self.holdings[self._source(name, self.rank)][name]
        states = dict(holding.plain)
        if parts is None:
            tensor, parts = self.held.tensors[name], self.held.parts(name)
        else:
            parts = {
                kind: part.cpu() if holding.parts[kind].is_on_host else part
                for kind, part in parts.items()
            }
            tensor = parts["value"]
            if holding.group is not None or holding.is_trained or "grad" in parts:
                tensor = nn.Parameter(tensor, holding.is_trained)
                tensor.grad = parts.get("grad")
        states |= {
            kind.removeprefix("state."): part
            for kind, part in parts.items()
            if kind.startswith("state.")
        }
        return Moved(tensor, holding.group, states)


def names_in(module: nn.Module) -> list[list[str]]:
    """Return all names of each tensor of a module that has no values."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if tensor.is_meta:
            names.setdefault(tensor, []).append(name)
    return list(names.values())


def put_in_place(module: nn.Module, moved: Mapping[str, Moved]) -> dict[str, Tensor]:
    """Give the tensors of a module their values [4]; return all of them by name."""
    placed: dict[str, Tensor] = {}
    for first, *others in names_in(module):
        tensor = moved[first].tensor
        owner, _, last = first.rpartition(".")
        is_parameter = isinstance(getattr(module.get_submodule(owner), last), nn.Parameter)
        if is_parameter and not isinstance(tensor, nn.Parameter):  # One that is not trained.
            tensor = nn.Parameter(tensor, requires_grad=False)
        for name in (first, *others):
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, tensor)
            placed[name] = tensor
    return placed


def refill(
    optimizer: torch.optim.Optimizer, moved: Mapping[str, Moved], names: Mapping[str, Tensor]
) -> None:
    """Give an optimizer the parameters that this rank has now, with their states [4]."""
    optimizer.state.clear()
    for number, group in enumerate(optimizer.param_groups):
        own = {names[name]: name for name, one in moved.items() if one.group == number}
        group["params"] = list(own)
        if "param_names" in group:
            group["param_names"] = list(own.values())
        for tensor, name in own.items():
            if moved[name].states:
                optimizer.state[tensor] = moved[name].states
