"""The calls of a model's units, in the order of its forward.

A *unit* is an entry of a module list or of a Sequential: a layer of a transformer, a stage of a
convolutional network. What a forward does before its first unit belongs to the first one, and
what it does after a unit belongs to that unit.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.cutting.own_backwards import ONE_AT_A_TIME, noticing_functions
from penstock.cutting.shape_counts import LayerCost, counted, counting_saved
from penstock.cutting.tensor_uses import NotingUses, Uses
from penstock.stage.unchanged import kept_as_it_was
from penstock.torch_private import pytree, version_of

LOGGER = logging.getLogger("penstock")
_RUN = "penstock_run"
_NAME = "penstock_name"


class Run(Protocol):
    """A forward of a model whose calls of units are caught."""

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a unit; `forward` is its own call."""


def catch_calls(module: nn.Module, name: str, run: Run) -> None:
    """Let calls of a module go to `run`. Its class becomes a subclass of its own class."""
    kind = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return kind.__call__(self, *args, **kwargs)

        return own[_RUN].call(own[_NAME], forward, args, kwargs)

    vars(module)[_RUN], vars(module)[_NAME] = run, name
    caught = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    module.__class__ = caught


def release_calls(module: nn.Module) -> None:
    """Undo `catch_calls`."""
    module.__class__ = type(module).__bases__[0]
    del vars(module)[_RUN], vars(module)[_NAME]


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a unit on the example."""

    name: str
    output: Any
    """Its output, with tensors on the meta device."""
    changes: Mapping[int, Any]
    """New contents of dicts and lists among its arguments, by their numbers, in the same form."""
    written: frozenset[int]
    """The numbers of the arguments' leaves that are changed in place then or later."""
    cost: LayerCost


@dataclass(frozen=True, slots=True)
class Recording:
    """A forward of the whole model on the example."""

    calls: list[UnitCall]
    uses: dict[Tensor, Uses]
    written: frozenset[str]
    """The inputs that the forward changes in place."""
    is_counted: bool
    """Whether costs are those of operations, not of parameters."""
    outputs: Any
    """The outputs of the model, with tensors on the meta device."""


def record_calls(model: nn.Module, kwargs: dict[str, Any], num_units: int) -> Recording:
    """Run the model on the example, and leave it as it was.

    Units are the outermost entries of lists, or the innermost ones if there are too few of those.
    """
    entries = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and type(module).forward is not nn.Module.forward
    ]
    found = _record_counted(model, entries, kwargs)
    if len(found.calls) >= num_units:
        return found
    names = [name for name, _ in entries]
    innermost = [
        (name, module)
        for name, module in entries
        if not any(other.startswith(f"{name}.") for other in names)
    ]
    return _record_counted(model, innermost, kwargs)


def _record_counted(
    model: nn.Module, entries: list[tuple[str, nn.Module]], kwargs: dict[str, Any]
) -> Recording:
    """Record a forward with the costs of its units, counted by parameters if not otherwise."""
    try:
        return _record(model, entries, kwargs, FlopCounterMode(display=False))
    except Exception as exc:  # Counting hooks into the backward, which a model may not allow.
        recording = _record(model, entries, kwargs, None)
        LOGGER.info("stages are balanced by the bytes of their parameters: %s", exc)
        return recording


def _record(
    model: nn.Module,
    entries: list[tuple[str, nn.Module]],
    kwargs: dict[str, Any],
    operations: FlopCounterMode | None,
) -> Recording:
    known = {*model.parameters(), *model.buffers()}
    with ExitStack() as stack:
        stack.enter_context(ONE_AT_A_TIME)
        stack.enter_context(attributes_kept(model))
        stack.enter_context(kept_as_it_was(model))
        count = None
        if operations is not None:
            stack.enter_context(operations)
            saved = stack.enter_context(counting_saved())
            for tensor in known:
                saved.leave_out(tensor)

            def count() -> tuple[int, int]:
                return operations.get_total_flops(), saved.num_bytes

        run = _RecordingRun(count)
        stack.enter_context(noticing_functions(run.functions))
        for name, module in entries:
            catch_calls(module, name, run)
            stack.callback(release_calls, module)
        own = pytree.tree_map_only(Tensor, Tensor.clone, kwargs)
        versions = {name: _versions(value) for name, value in own.items()}
        with NotingUses(known, lambda: (run.position, run.is_inside)) as uses:
            outputs = _run(model, own)
        written = frozenset(name for name in own if _versions(own[name]) != versions[name])
        calls, is_counted = run.finish(uses.found), operations is not None
        return Recording(calls, uses.found, written, is_counted, _forms(outputs))


def _run(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    try:
        return model(**kwargs)
    except Exception as exc:
        if any(
            tensor.is_meta for tensor in pytree.tree_leaves(kwargs) if isinstance(tensor, Tensor)
        ):
            exc.add_note(
                "The model ran on the meta device, where tensors have no values to read. Leave out "
                "of the example what the model reads, such as a mask of padding, or make the model "
                "on a device."
            )
        raise


def _versions(tree: Any) -> list[int]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _RecordingRun:
    """A forward of the whole model, of which the calls of units are recorded."""

    def __init__(self, count: Callable[[], tuple[int, int]] | None) -> None:
        """Begin; `count` returns the operations so far, and the bytes held for a backward."""
        self.is_inside = False
        self.functions: list[bool] = []
        """Not empty in the forward of an autograd Function, in which no stage can end."""
        self._is_counted = count is not None
        self._count = count or (lambda: (0, 0))
        self._counts: list[tuple[int, int]] = []
        self._calls: list[tuple[str, Any, Mapping[int, Any]]] = []
        self._arguments: list[list[tuple[int, Tensor, int]]] = []

    @property
    def position(self) -> int:
        """The number of the call that goes on, or that was the last one."""
        return max(0, len(self._arguments) - 1)

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.is_inside or self.functions:
            return forward(*args, **kwargs)
        if self._arguments:
            self._counts.append(self._count())
        leaves = enumerate(pytree.tree_leaves((args, kwargs)))
        tensors = [(k, leaf, version_of(leaf)) for k, leaf in leaves if isinstance(leaf, Tensor)]
        self._arguments.append(tensors)
        before = [_contents(container) for container in containers_in((args, kwargs))]
        self.is_inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self.is_inside = False
        changes = {
            number: _forms(container)
            for number, container in enumerate(containers_in((args, kwargs)))
            if number < len(before) and _contents(container) != before[number]
        }
        self._calls.append((name, _forms(output), changes))
        return output

    def finish(self, uses: dict[Tensor, Uses]) -> list[UnitCall]:
        """Return the calls, once the forward has ended."""
        counts = [(0, 0), *self._counts, self._count()]
        calls = []
        for number, (name, output, changes) in enumerate(self._calls):
            operations, kept = (counts[number + 1][each] - counts[number][each] for each in (0, 1))
            parameter_bytes = sum(
                tensor.nbytes
                for tensor, own in uses.items()
                if isinstance(tensor, nn.Parameter) and min(own.calls) == number
            )
            written = frozenset(
                k for k, tensor, version in self._arguments[number] if version_of(tensor) != version
            )
            cost = counted(name, operations, kept, parameter_bytes)
            if not self._is_counted:
                cost = LayerCost(name, max(1, parameter_bytes), parameter_bytes, 0)
            calls.append(UnitCall(name, output, changes, written, cost))
        return calls


def containers_in(tree: Any) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield the dicts and lists in the arguments of a call, which the call may change."""
    args, kwargs = tree
    pending = [*args, *kwargs.values()]
    while pending:
        value = pending.pop(0)
        if type(value) in (dict, list):
            yield value
        if type(value) in (tuple, list):
            pending += value
        elif type(value) is dict:
            pending += value.values()


def _contents(container: dict[Any, Any] | list[Any]) -> list[tuple[Any, int]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]


def _forms(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), tree)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back the attributes of modules that a forward sets or replaces."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def example_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
