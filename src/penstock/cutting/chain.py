"""Modules that are called one after the other, and stages made of them."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from penstock.cutting.cut_model import CutModel
from penstock.cutting.marks import find_module, unknown_name
from penstock.cutting.model_names import Names, install
from penstock.errors import PartitionError, StageError
from penstock.ir import StageId
from penstock.stage.outputs import as_arguments
from penstock.torch_private import (
    hooks_of_calls,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    pytree,
)

Called: TypeAlias = nn.Module | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """The layers of a model in the order of their calls, with names; functions have names too."""

    model: nn.Module
    names: list[str]
    layers: list[Called]

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[str | Callable[..., Any]] | None) -> "Chain":
        """Return the chain that `layers` describes, or without `layers` that of a Sequential."""
        if layers is None:
            if not _is_sequence(model):
                raise PartitionError(
                    f"{type(model).__name__} has its own forward or hooks, so it does more than "
                    "call its modules one after the other. Give layers, the names of its modules "
                    "in the order in which they are called, or trace it with penstock.cut()."
                )
            found: list[tuple[str, Called]] = list(_expand("", model))
        else:
            found = [pair for layer in layers for pair in _find(model, layer)]
        names, modules = zip(*found, strict=True) if found else ((), ())
        chain = cls(model, list(names), list(modules))
        chain._check_complete()
        return chain

    def _check_complete(self) -> None:
        held = {
            tensor
            for layer in self.layers
            if isinstance(layer, nn.Module)
            for tensor in (*layer.parameters(), *layer.buffers())
        }
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and tensor not in held:
                raise PartitionError(
                    f"{name!r} of {type(self.model).__name__} is not in any of its layers, so no "
                    "stage would hold it. Name the module that has it in layers, or move it into "
                    "a module with a forward."
                )

    def find(self, name: str) -> int:
        """Return the index of the layer at which a stage should begin."""
        starts = [
            index
            for index, known in enumerate(self.names)
            if known == name or known.startswith(f"{name}.")
        ]
        if not starts:
            raise unknown_name(
                "the cut point", name, self.names, "Name the first layer of each later stage."
            )
        return starts[0]

    def cut(self, starts: Iterable[int], *, is_trial: bool = False) -> CutModel:
        """Cut the model into stages that begin at these layers; a trial only runs them singly."""
        begins = list(starts)
        ends = [*begins[1:], len(self.names)]
        if begins != sorted(set(begins)) or len(self.names) in begins:
            listed = ", ".join(self.names[begin] for begin in begins[1:])
            raise PartitionError(
                f"the cut points {listed} leave a stage without a layer. "
                "Give each once, in the order of the model, and do not give the first layer."
            )
        ranges = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]
        if not is_trial:
            self._check_buffers(ranges)
        tied = self._tied(ranges)
        keywords = frozenset[str]().union(*map(_keywords, self.layers))
        stages = []
        for stage, indices in enumerate(ranges):
            copied = {t for t, holders in tied.items() if stage in holders[1:]}
            stages.append(self._stage(stage, indices, copied, keywords))
        names = Names(self.model)
        by_stage = [self._names_of(indices, tied, names) for indices in ranges]
        return CutModel(stages, by_stage, [self.names[begin] for begin in begins[1:]])

    def _check_buffers(self, ranges: Sequence[range]) -> None:
        """Raise an error if stages might change separate copies of a buffer, such as statistics."""
        found: dict[nn.Module, StageId] = {}
        for stage, indices in enumerate(ranges):
            for module in (m for i in indices for m in _modules(self.layers[i])):
                is_stateful = own_buffers(module).keys() - non_persistent_buffers(module)
                if is_stateful and found.setdefault(module, stage) != stage:
                    raise PartitionError(
                        f"stages {found[module]} and {stage} both call a {type(module).__name__} "
                        f"with the buffers {', '.join(sorted(is_stateful))}, and each would have "
                        "its own copy. Cut the model so that one stage has all its calls, or "
                        "register the buffers with persistent=False if they never change."
                    )

    def _tied(self, ranges: Sequence[range]) -> dict[Tensor, list[StageId]]:
        """Return the parameters that several stages hold, with those stages."""
        holders: defaultdict[Tensor, list[StageId]] = defaultdict(list)
        for stage, indices in enumerate(ranges):
            held = (p for i in indices for _, p in _named_parameters(self.layers[i]))
            for parameter in dict.fromkeys(held):
                holders[parameter].append(stage)
        return {tensor: stages for tensor, stages in holders.items() if len(stages) > 1}

    def _names_of(self, indices: range, tied: Collection[Tensor], names: Names) -> dict[str, str]:
        """Map the names of tied parameters in one stage to their first names in the model."""
        found: dict[Tensor, str] = {}
        for index in indices:
            for name, parameter in _named_parameters(self.layers[index]):
                if parameter in tied:
                    found.setdefault(parameter, f"{self.names[index]}.{name}")
        return {own: names.of(parameter)[0] for parameter, own in found.items()}

    def _stage(
        self, stage: StageId, indices: range, copied: set[Tensor], keywords: frozenset[str]
    ) -> "ChainStage":
        """Return a stage with the layers' own parameters, but with copies of those in `copied`."""
        # deepcopy does not copy what it finds in its memo.
        memo: dict[int, Any] = {}
        layers = []
        for index in indices:
            layer = self.layers[index]
            if isinstance(layer, nn.Module) and not copied.isdisjoint(layer.parameters()):
                own = [t for t in (*layer.parameters(), *layer.buffers()) if t not in copied]
                memo.update({id(tensor): tensor for tensor in own})
                layer = deepcopy(layer, memo)
            layers.append((self.names[index], layer))
        return ChainStage(stage, layers, keywords, self.model.training)


class ChainStage(nn.Module):
    """Layers called one after the other; modules keep their names from the model."""

    def __init__(
        self,
        stage: StageId,
        layers: Sequence[tuple[str, Called]],
        known: frozenset[str],
        is_training: bool,
    ) -> None:
        """Store the layers; `known` has the keyword arguments that layers of any stage take."""
        super().__init__()
        self._stage, self._known = stage, known
        self.training = is_training
        self._begins_in_place = bool(getattr(layers[0][1], "inplace", False))
        self._calls: list[tuple[str, Callable[..., Any] | None, frozenset[str]]] = []
        for name, layer in layers:
            if isinstance(layer, nn.Module):
                install(self, name, layer)
            function = None if isinstance(layer, nn.Module) else layer
            self._calls.append((name, function, _keywords(layer)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            self._check_keywords(kwargs)
        values: Any = args
        if self._begins_in_place:
            # An input of a stage is a leaf, and autograd does not allow changing one in place.
            values = pytree.tree_map_only(Tensor, Tensor.clone, args)
        for name, function, keywords in self._calls:
            layer = self.get_submodule(name) if function is None else function
            given = {key: value for key, value in kwargs.items() if key in keywords}
            values = layer(*as_arguments(values), **given)
        return values

    def _check_keywords(self, given: Iterable[str]) -> None:
        unknown = [f"{key}=" for key in given if key not in self._known]
        if unknown:
            raise StageError(
                f"stage {self._stage} was given the keyword arguments {', '.join(unknown)}, but no "
                "layer of the model has a parameter with such a name. Leave them out, or let the "
                "forward of a layer name them; **kwargs of a layer gets none."
            )


def modules_called_by(stage: ChainStage) -> list[nn.Module]:
    """Return the modules that a stage calls, each once.

    Not a method: the modules of the model are attributes of the stage, under any name.
    """
    names = (name for name, function, _ in stage._calls if function is None)
    return list(dict.fromkeys(map(stage.get_submodule, names)))


def _find(model: nn.Module, layer: str | Callable[..., Any]) -> Iterator[tuple[str, Called]]:
    if isinstance(layer, nn.Module):
        yield from _expand(_name_of(model, layer), layer)
        return
    if callable(layer):
        yield getattr(layer, "__name__", type(layer).__name__), layer
        return
    yield from _expand(layer, find_module(model, layer, "layer"))


def _name_of(model: nn.Module, layer: nn.Module) -> str:
    for name, module in model.named_modules():
        if module is layer:
            return str(name)
    raise PartitionError(
        f"layers holds a {type(layer).__name__} that is not a module of {type(model).__name__}, "
        "so its parameters would have no names. Make it a module of the model, or give a function."
    )


def _expand(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that a module consists of: itself, or its entries."""
    if not _is_sequence(module):
        yield name, module
        return
    for entry, child in own_modules(module).items():
        if child is not None:
            yield from _expand(f"{name}.{entry}" if name else entry, child)


def _is_sequence(module: nn.Module) -> bool:
    """Return whether a module only calls its entries one after the other."""
    if isinstance(module, nn.ModuleList):
        return True
    is_plain = type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
    return is_plain and not any(hooks_of_calls(module))


def _modules(layer: Called) -> Iterable[nn.Module]:
    return layer.modules() if isinstance(layer, nn.Module) else ()


def _named_parameters(layer: Called) -> Iterable[tuple[str, Tensor]]:
    return layer.named_parameters() if isinstance(layer, nn.Module) else ()


def _keywords(layer: Called) -> frozenset[str]:
    """Return the keyword arguments that a layer takes by name."""
    function = layer.forward if isinstance(layer, nn.Module) else layer
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A function written in C may have no signature.
        return frozenset()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in kinds)
