"""Hooks that note the smallest and largest value of everything that modules compute in a step.

A tensor is finite exactly if both are, as NaN makes both NaN. Hooks only start these reductions:
nothing waits for them until the end of the step.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from math import inf, isnan
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from penstock.backward.wrappers import is_compiled
from penstock.comm.collective_results import values_of
from penstock.ir import (
    Backward,
    BackwardWeight,
    Forward,
    Message,
    MicrobatchId,
    Recompute,
    StageId,
)
from penstock.ir.dataflow import Dataflow
from penstock.runtime.bad_values.bad_value import Phase
from penstock.runtime.bad_values.noted_graph import NotedGraph
from penstock.runtime.measuring.observer import AbstractMemoryCount, Leaves, Note, StepView
from penstock.runtime.program import Task
from penstock.stage import PipelineStage
from penstock.stage.dtensors import local_part
from penstock.stage.stage_checks import unwrapped
from penstock.torch_private import pytree

_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)


class Found(NamedTuple):
    """A tensor that is not finite."""

    phase: Phase
    stage: StageId
    mb: MicrobatchId | None
    place: str
    value: str


class _Noted(NamedTuple):
    """Tensors of one call, and the extremes of each."""

    phase: Phase
    stage: StageId
    places: Sequence[Any]
    """For each tensor a text, or the names of the modules that take it."""
    extremes: Tensor
    """Two numbers for each tensor, the smallest and the largest."""


class ValueWatch(AbstractMemoryCount):
    """Notes the values of one step; `inner` counts its memory as if this were not there."""

    def __init__(
        self,
        inner: AbstractMemoryCount,
        stages: Mapping[StageId, PipelineStage],
        graphs: "WeakKeyDictionary[fx.GraphModule, NotedGraph]",
    ) -> None:
        self._inner = inner
        self._stages = stages
        self._graphs = graphs
        self._noted: list[tuple[MicrobatchId | None, _Noted]] = []
        self._hooks: list[RemovableHandle] = []
        self._new: list[_Noted] = []
        """Those of the running action."""
        self._last: ref[Tensor] | None = None
        """The output that was noted last: a container often returns that of its last module."""
        self._taken: dict[int, tuple[ref[Tensor], list[str]]] = {}
        """By identity: the inputs of modules, with the names of those that take them."""

    def begin(self, flow: Dataflow) -> None:
        self._inner.begin(flow)

    def take_over(self, leaves: Leaves) -> Leaves:
        return self._inner.take_over(leaves)

    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        self._inner.arrived(messages, leaves)

    def watching(self, stage: PipelineStage, arguments: Any) -> AbstractContextManager[Note]:
        return self._inner.watching(stage, arguments)

    def computed(self, task: Task, step: StepView) -> None:
        """Note what the task made for others, and the gradients that it has completed."""
        self._inner.computed(task, step)
        action = task.action
        stage = self._stages[action.stage]
        if isinstance(action, BackwardWeight | Backward) and not stage.is_sharded:
            self._note_grads(Phase.WEIGHTS, stage)  # Otherwise they are not there yet.
        if is_compiled(_root_of(stage)) and not isinstance(action, BackwardWeight | Recompute):
            made = [leaf for leaves in step.made_by(task) for leaf in leaves]
            is_forward = isinstance(action, Forward)
            place = "its outputs" if is_forward else "the gradients of its inputs"
            self._note(Phase.FORWARD if is_forward else Phase.BACKWARD, action.stage, place, made)
        self._noted += [(action.mb, noted) for noted in self._new]
        self._new.clear()
        self._taken.clear()

    def end(self) -> None:
        """Note the gradients that the step leaves, after all reductions."""
        for stage in self._stages.values():
            self._note_grads(Phase.END, stage)
        self._noted += [(None, noted) for noted in self._new]
        self._new.clear()

    def found(self) -> list[Found]:
        """Return the tensors that are not finite, in the order in which they were computed."""
        rows = defaultdict(list)
        for place, (_, noted) in enumerate(self._noted):
            rows[noted.extremes.device, noted.extremes.dtype].append(place)
        numbers: dict[int, list[float]] = {}
        for places in rows.values():
            joined = torch.cat([self._noted[place][1].extremes for place in places])
            if joined.isfinite().all():
                continue
            values = (low if isnan(low) or low == -inf else high for low, high in joined.tolist())
            for place in places:
                count = len(self._noted[place][1].places)
                numbers[place] = [next(values) for _ in range(count)]
        return [
            Found(noted.phase, noted.stage, mb, _in_words(label), "nan" if isnan(value) else "inf")
            for at, (mb, noted) in enumerate(self._noted)
            for label, value in zip(noted.places, numbers.get(at, ()), strict=False)
            if isnan(value) or abs(value) == inf
        ]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Return a context in which the calls of all modules that are not compiled are noted."""
        with ExitStack() as stack:
            for index, stage in self._stages.items():
                for name, module in _plain_modules(_root_of(stage)):
                    before = partial(self._before_call, index, name)
                    after = partial(self._after_call, index, name)
                    stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(after))
                    if isinstance(module, fx.GraphModule):
                        graph = self._graphs.get(module) or NotedGraph(module)
                        self._graphs[module] = graph
                        stack.enter_context(graph.noting(partial(self._note_between, index)))
            yield
        for hook in self._hooks:  # Parameters that modules take as inputs would keep theirs.
            hook.remove()

    def _note_between(self, stage: StageId, value: Any, source: str, takers: list[str]) -> None:
        """Note a value that passes from one module of a traced stage to others."""
        self._note(Phase.FORWARD, stage, [source], [value])
        if isinstance(value, Tensor) and value.requires_grad and takers:
            note = partial(self._note_one, Phase.BACKWARD, stage, takers)
            self._hooks.append(value.register_hook(note))  # type: ignore[no-untyped-call]  # untyped in torch

    def _before_call(
        self, stage: StageId, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not name:
            self._note(Phase.FORWARD, stage, "its inputs", inputs)
        for x in inputs:
            if not x.requires_grad:
                continue
            known = self._taken.get(id(x))
            if known is not None and known[0]() is x:
                known[1].append(name)
                continue
            names = [name]
            self._taken[id(x)] = ref(x), names
            note = partial(self._note_one, Phase.BACKWARD, stage, names)
            self._hooks.append(x.register_hook(note))  # type: ignore[no-untyped-call]  # untyped in torch

    def _after_call(
        self, stage: StageId, name: str, module: nn.Module, args: Any, outputs: Any
    ) -> None:
        found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
        if len(found) != 1 or self._last is None or self._last() is not found[0]:
            self._note(Phase.FORWARD, stage, [name], found)
            self._last = ref(found[0]) if len(found) == 1 else None
        if not name:
            for x in found:
                if x.requires_grad:
                    place = "the gradients of its outputs"
                    note = partial(self._note_one, Phase.BACKWARD, stage, place)
                    self._hooks.append(x.register_hook(note))  # type: ignore[no-untyped-call]  # untyped in torch

    def _note_one(self, phase: Phase, stage: StageId, place: Any, tensor: Tensor) -> None:
        self._note(phase, stage, place, [tensor])

    @torch.no_grad()
    def _note(self, phase: Phase, stage: StageId, place: Any, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.dtype in _DTYPES:
                local = values_of(local_part(tensor))
                if local.numel():
                    self._new.append(_Noted(phase, stage, [place], _extremes_of(local)[None]))

    @torch.no_grad()
    def _note_grads(self, phase: Phase, stage: PipelineStage) -> None:
        rows = defaultdict(list)
        for name, parameter in unwrapped(stage.submod).named_parameters():
            if parameter.grad is None:
                continue
            grad = values_of(local_part(parameter.grad))
            if grad.layout is not torch.strided:
                grad = grad.coalesce().values()
            if grad.numel():
                rows[grad.device, grad.dtype].append((f"parameter {name}", grad))
        for row in rows.values():
            places, grads = zip(*row, strict=True)
            extremes = torch.stack(list(map(_extremes_of, grads)))
            self._new.append(_Noted(phase, stage.stage_index, places, extremes))


def _extremes_of(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest value; an infinite norm takes 20 times as long."""
    return torch.stack(torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor))


def _root_of(stage: PipelineStage) -> nn.Module:
    """Return the module of a stage, which may be compiled, without a data-parallel wrapper."""
    return stage.submod.get_submodule("module") if stage.is_data_parallel else stage.submod


def _plain_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose calls run as Python, with their names: none that is compiled."""

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
            return
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    yield from {id(module): (name, module) for name, module in walk("", root)}.values()


def _is_within(name: str, container: str) -> bool:
    return not container or name.startswith(f"{container}.")


def _in_words(place: str | list[str]) -> str:
    """Return the module that takes a tensor: the innermost, or what all that take it are part of.

    >>> _in_words(["", "layers.0", "layers.0.norm"])
    'module layers.0.norm'
    >>> _in_words(["attention.q", "attention.k"])
    'module attention'
    """
    if isinstance(place, str):
        return place
    inner = [
        name
        for name in place
        if not any(other != name and _is_within(other, name) for other in place)
    ]
    if len(set(inner)) > 1:
        rows = zip(*(name.split(".") for name in inner), strict=False)
        parts = [row[0] for row in takewhile(lambda row: len(set(row)) == 1, rows)]
        return f"module {'.'.join(parts)}" if parts else "its module"
    return f"module {inner[0]}" if inner[0] else "its module"
