"""Forwards that run twice: for their outputs, and again for their backwards.

The first run keeps nothing but what it began with. The buffers that it changes in place, such as
running statistics, are copied before, and the attributes of modules that it sets are noted, so that
the second run begins with the same values. What the second one changes is thrown away.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from penstock.backward.structure import describe
from penstock.errors import StageError
from penstock.ir import MicrobatchId
from penstock.stage.dtensors import copy_with_spread, local_part
from penstock.stage.random_states import RandomStates
from penstock.torch_private import (
    TRANSFORMS_REFUSE_HOOKS,
    is_compiler_loaded,
    own_buffers,
    pytree,
    version_of,
)

_MISSING = object()


class Arguments(NamedTuple):
    """The arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class _Value:
    """A tensor that a forward reads: an input, or the buffer `name` of a module."""

    tensor: Tensor
    version: int
    copy: Tensor | None
    """A copy from before the forward, if that may have changed it."""
    module: int = -1
    name: str = ""

    @property
    def is_changed(self) -> bool:
        """True if it was changed in place, as far as torch counts that."""
        return version_if_any(self.tensor) != self.version

    @property
    def has_new_values(self) -> bool:
        """True if the values differ from the copy: batch_norm changes its buffers uncounted."""
        return self.copy is not None and not torch.equal(
            local_part(self.tensor), local_part(self.copy)
        )


class RepeatedForwards:
    """The forwards of a stage that run twice in one step.

    The first of them shows which buffers a forward changes in place, and whether it changes
    inputs. Only these are copied before the others.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, place: str, *, is_sharded: bool
    ) -> None:
        named = [pair for module in modules for pair in module.named_modules()]
        self.place = place
        self.device = device
        self.names = [name for name, _ in named]
        self.buffers = [own_buffers(module) for _, module in named]
        self.generators = [
            value
            for _, module in named
            for value in vars(module).values()
            if isinstance(value, torch.Generator)
        ]
        # Gathering and freeing replaces those of a sharded module.
        params = [] if is_sharded else [p for module in modules for p in module.parameters()]
        self.parameters = [param for param in params if not is_lazy(param)]
        # A reducer's own state must go on from one forward to the next.
        own = [module for _, module in named if not isinstance(module, DistributedDataParallel)]
        self.attributes: list[dict[str, Any]] = list(map(vars, own))
        self.changing: set[tuple[int, str]] | None = None
        """The buffers that forwards change in place; None before the first of them."""
        self.changes_inputs = True
        self.assigned: list[tuple[dict[str, Any], str]] = []
        """The attributes of modules that forwards set."""

    def begin(self, mb: MicrobatchId, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Repeated":
        """Note what a forward begins with; call `settle` of the result when it has run."""
        return Repeated(self, mb, args, kwargs)


class Repeated:
    """One forward that runs twice, and the values that it begins with."""

    def __init__(
        self, forwards: RepeatedForwards, mb: MicrobatchId, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._forwards = forwards
        self._place = f"{forwards.place}, microbatch {mb}"
        # Flattened: a forward may change the lists and dicts that it is given, too.
        self._leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._buffers = [dict(own) for own in forwards.buffers]
        self._values = [
            _noted(leaf, is_copied=forwards.changes_inputs)
            for leaf in {id(leaf): leaf for leaf in self._leaves}.values()
            if isinstance(leaf, Tensor)
        ]
        for module, own in enumerate(self._buffers):
            for name, buffer in own.items():
                if buffer is not None:
                    is_copied = forwards.changing is None or (module, name) in forwards.changing
                    self._values.append(_noted(buffer, is_copied, module, name))
        self._weights = list(map(version_if_any, forwards.parameters))
        self._snapshot = list(map(dict, forwards.attributes)) if forwards.changing is None else []
        self._assigned = [(own, key, own.get(key, _MISSING)) for own, key in forwards.assigned]
        self._random = RandomStates(forwards.device, forwards.generators)

    def settle(self) -> None:
        """Keep copies of what the forward has changed, and of nothing else."""
        self._check_weights("the forward changes")
        if self._forwards.changing is None:
            self._learn()
        for value in self._values:
            if value.copy is not None and value.module >= 0:
                self._buffers[value.module][value.name] = value.copy
            elif value.copy is None and value.is_changed:
                raise StageError(
                    f"{self._place}: the forward has changed {self._described(value)} in place, "
                    "which the first forward of this step did not, so its value from before is "
                    "lost and the forward cannot run again. Expected forwards that change the same "
                    "tensors. Remove the recomputation of this stage, or give it a tensor of its "
                    "own to change."
                )

    def _learn(self) -> None:
        """Find what the first forward of the step has changed, and drop all other copies."""
        forwards = self._forwards
        forwards.changing, forwards.changes_inputs = set(), False
        for value in self._values:
            if value.module < 0:
                forwards.changes_inputs |= value.is_changed
            elif value.is_changed or value.has_new_values:
                forwards.changing.add((value.module, value.name))
        self._assigned = [
            (own, key, before.get(key, _MISSING))
            for own, before in zip(forwards.attributes, self._snapshot, strict=True)
            for key in {**before, **own}
            if before.get(key, _MISSING) is not own.get(key, _MISSING)
        ]
        forwards.assigned = [(own, key) for own, key, _ in self._assigned]
        forwards.generators += [
            own[key] for own, key in forwards.assigned if isinstance(own.get(key), torch.Generator)
        ]
        self._snapshot = []
        for value in self._values:
            is_input, place = value.module < 0, (value.module, value.name)
            if not (forwards.changes_inputs if is_input else place in forwards.changing):
                value.copy = None

    @contextmanager
    def again(self) -> Iterator[tuple[Arguments, dict[int, Tensor]]]:
        """Run the forward again in this context, with the arguments that it yields.

        It also yields the tensors that replace inputs which the first run changed, by the ids of
        these.
        """
        self._check_weights("something has changed")
        for value in self._values:
            if value.copy is None and value.is_changed:
                raise StageError(
                    f"{self._place}: {self._described(value)} was changed in place between the "
                    "forward and its recomputation, which would compute something else. Expected "
                    "it to stay unchanged: give each stage and microbatch its own tensors."
                )
        copies = {
            id(value.tensor): value.copy
            for value in self._values
            if value.module < 0 and value.copy is not None
        }
        leaves = [copies.get(id(leaf), leaf) for leaf in self._leaves]
        with ExitStack() as stack:
            stack.enter_context(self._random.again())
            for own, before in zip(self._forwards.buffers, self._buffers, strict=True):
                if own or before:
                    stack.enter_context(_replaced(own, before))
            stack.enter_context(_assigned(self._assigned))
            yield Arguments(*pytree.tree_unflatten(leaves, self._structure)), copies

    def _check_weights(self, who: str) -> None:
        params = self._forwards.parameters
        for param, version in zip(params, self._weights, strict=True):
            if version_if_any(param) != version:
                raise StageError(
                    f"{self._place}: {who} a parameter {describe(param)} in place, so the "
                    "recomputation of the forward would compute something else. Expected "
                    "parameters that stay unchanged until the last backward of the stage: update "
                    "them after the step, or remove the recomputation of this stage."
                )

    def _described(self, value: _Value) -> str:
        if value.module < 0:
            return f"an input {describe(value.tensor)}"
        module = self._forwards.names[value.module]
        return f"buffer {f'{module}.{value.name}' if module else value.name!r}"


def nothing_saved() -> AbstractContextManager[None]:
    """Return a context in which graphs keep no tensors, so that they have no backward."""
    return keeping_nothing(_drop, refuse_backward)


@contextmanager
def keeping_nothing(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Let graphs keep what `pack` makes of a tensor; `unpack` is to make a tensor of it again."""
    try:
        with saving(pack, unpack):
            yield
    except RuntimeError as error:
        if TRANSFORMS_REFUSE_HOOKS not in str(error):
            raise
        raise StageError(
            "the forward computes gradients by torch.func, such as torch.func.grad, which does "
            "not work where graphs keep nothing; but the schedule recomputes it. Expected a "
            "forward without that: remove the recomputation of this stage, or name the parts of "
            "it that do without in its recomputed."
        ) from error


def saving(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> AbstractContextManager[Any]:
    """Return a context with these hooks on what graphs save; compilers do not look into them."""
    if is_compiler_loaded():
        pack = torch.compiler.disable(pack)  # type: ignore[no-untyped-call]  # torch's is untyped
    context: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    return context


def _drop(tensor: Tensor) -> None:
    """Keep nothing of a tensor that a graph would save."""


def refuse_backward(kept: None) -> Tensor:
    """Raise an error, in place of a tensor that was not kept."""
    raise StageError(
        "the forward computes gradients, so it needs what its graph saves; but the schedule "
        "recomputes it, so nothing is saved. Expected a forward without a backward in it. Remove "
        "the recomputation of this stage."
    )


def _noted(tensor: Tensor, is_copied: bool, module: int = -1, name: str = "") -> _Value:
    copy = None
    if is_copied:
        copy = copy_with_spread(tensor.detach()).requires_grad_(tensor.requires_grad)
    return _Value(tensor, version_if_any(tensor), copy, module, name)


def version_if_any(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else version_of(tensor)


@contextmanager
def _assigned(values: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set these attributes, and put back at the end what they are now."""
    now = [(own, key, own.get(key, _MISSING)) for own, key, _ in values]
    _assign(values)
    try:
        yield
    finally:
        _assign(now)


def _assign(values: list[tuple[dict[str, Any], str, Any]]) -> None:
    for own, key, value in values:
        if value is _MISSING:
            own.pop(key, None)
        else:
            own[key] = value


@contextmanager
def _replaced(own: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Put these values in the place of all others in a dict, and the others back at the end."""
    now = dict(own)
    own.clear()
    own.update(values)
    try:
        yield
    finally:
        own.clear()
        own.update(now)
