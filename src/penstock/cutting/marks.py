"""Marks in a model's forward, at which it is to be cut."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect

from penstock.errors import PartitionError


class SplitPoint(Enum):
    """The side of a module's call on which the model is cut."""

    BEGINNING = 1
    END = 2


@torch.library.custom_op("penstock::pipe_split", mutates_args=())
def _mark() -> None:
    """Do nothing, but leave a node in a traced graph."""


_mark.register_fake(lambda: None)
MARK = torch.ops.penstock.pipe_split.default
has_side_effect(MARK)  # Its result is not used, but it must stay in the graph.


def pipe_split() -> None:
    """Begin the next stage here, in a model's forward. Does nothing when the model is run."""
    _mark()


@contextmanager
def marked(model: nn.Module, split_spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Let calls of the modules in `split_spec` leave marks."""
    if not isinstance(split_spec, Mapping):
        raise PartitionError(
            f"split_spec is {split_spec!r}. Expected a mapping from module names to "
            "SplitPoint.BEGINNING or SplitPoint.END."
        )
    called: set[str] = set()
    with ExitStack() as hooks:
        for name, point in split_spec.items():
            module = find_module(model, name, "cut point")

            def leave_mark(*_: Any, name: str = name) -> None:
                called.add(name)
                pipe_split()

            if point is SplitPoint.BEGINNING:
                hook = module.register_forward_pre_hook(leave_mark)
            elif point is SplitPoint.END:
                hook = module.register_forward_hook(leave_mark)
            else:
                raise PartitionError(
                    f"split_spec[{name!r}] is {point!r}. "
                    "Expected SplitPoint.BEGINNING or SplitPoint.END."
                )
            hooks.callback(hook.remove)
        yield
    for name in split_spec:
        if name not in called:
            raise PartitionError(
                f"split_spec has a cut at {name!r}, but the model's forward never calls that "
                "module. Name a module that is called; one that only holds others, such as a "
                "ModuleList, is not."
            )


def unify_marks(graph_module: fx.GraphModule) -> None:
    """Turn calls of `pipe_split` in a graph, under any of its names, into marks."""
    names = (pipe_split, _mark, torch.ops.penstock.pipe_split)
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and any(node.target is name for name in names):
            node.target = MARK


def remove_marks(graph_module: fx.GraphModule) -> None:
    """Remove all marks from a graph, and from the graphs within it."""
    remove_calls(graph_module, MARK)


def remove_calls(graph_module: fx.GraphModule, operation: Any) -> None:
    """Remove all calls of an operation without a used result from a graph and those within it."""
    for module in _graph_modules(graph_module):
        for node in module.graph.find_nodes(op="call_function", target=operation):
            module.graph.erase_node(node)
        module.recompile()


def check_marks(graph_module: fx.GraphModule) -> None:
    """Raise an error if there is a mark where a graph cannot be cut: in a graph within it."""
    for module in _graph_modules(graph_module):
        if module is not graph_module and module.graph.find_nodes(op="call_function", target=MARK):
            raise PartitionError(
                "a cut point lies in a part of the forward that a trace keeps whole: under "
                "torch.no_grad() or torch.autocast(), in torch.cond(), or the like. Move it "
                "before or after that part."
            )


def _graph_modules(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]


def unknown_name(what: str, name: object, names: Iterable[str], expected: str) -> PartitionError:
    """Return the error for a name that does not exist; it suggests the closest names."""
    close = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.4)
    hint = f" The closest are {', '.join(map(repr, close))}." if close else ""
    return PartitionError(f"{what} {name!r} does not exist.{hint} {expected}")


def find_module(model: nn.Module, name: str, what: str) -> nn.Module:
    """Return the module of that name; `what` says in the error what the name is for."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules or not name:
        raise unknown_name(
            f"the {what} of {type(model).__name__}",
            name,
            (known for known in modules if known),
            "Name a module as model.named_modules() does.",
        )
    return modules[name]
