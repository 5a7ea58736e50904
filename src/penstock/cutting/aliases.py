"""Memory that values of a graph share, and the operations that change it."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from penstock.torch_private import (
    OpOverload,
    pytree,
    schema_of,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)

_aten = torch.ops.aten
# Operations that run a graph within the graph.
CONTEXTS = (wrap_with_set_grad_enabled, wrap_with_autocast)
# Arguments that these operations change, and the argument that must be true for that; their
# schemas do not say so.
_HIDDEN_WRITES = {
    _aten.batch_norm.default: ((3, 4), 5),
    _aten.instance_norm.default: ((3, 4), 5),
}


class Aliases:
    """The nodes of a graph that share memory, and the operations that change it."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.root: dict[Node, Node] = {}
        self.changed: dict[Node, list[Node]] = {}
        """The nodes that each operation changes in place."""
        for node in graph_module.graph.nodes:
            source = _aliased(node, graph_module)
            self.root[node] = node if source is None else self.root[source]
            self.changed[node] = [*_changed_by(node), *_changed_within(node, graph_module)]
        self.changed_roots = {
            self.root[changed] for nodes in self.changed.values() for changed in nodes
        }

    def written_among(self, nodes: Iterable[Node], values: Iterable[Node]) -> list[Node]:
        """Return those of `values` whose memory one of `nodes` changes."""
        roots = {self.root[changed] for node in nodes for changed in self.changed[node]}
        return [value for value in values if self.root[value] in roots]


def _aliased(node: Node, graph_module: fx.GraphModule) -> Node | None:
    """Return the node whose memory the result of `node` may share, or None."""
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        if source.target in CONTEXTS:
            return _aliased_within(source, node.args[1], graph_module)
        return source if _aliased(source, graph_module) is not None else None
    if isinstance(node.target, OpOverload):
        if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
            # For example, dropout that is off returns its input.
            return next(iter(node.all_input_nodes), None)
        if not any(result.alias_info for result in schema_of(node.target).returns):
            return None
        for argument, value in _arguments(node):
            if argument.alias_info is not None and isinstance(value, Node):
                return value
    return None


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments in the schema of an operation, each with its value."""
    assert isinstance(node.target, OpOverload)
    for number, argument in enumerate(schema_of(node.target).arguments):
        if number < len(node.args):
            yield argument, node.args[number]
        else:
            yield argument, node.kwargs.get(argument.name)


def _aliased_within(node: Node, number: Any, graph_module: fx.GraphModule) -> Node | None:
    """Return the argument of a node that runs a graph whose memory one of its results may share."""
    for inner, given in graphs_within(node, graph_module):
        (output,) = inner.graph.find_nodes(op="output")
        return given.get(Aliases(inner).root[output.args[0][number]])
    return None


def graphs_within(
    node: Node, graph_module: fx.GraphModule
) -> Iterator[tuple[fx.GraphModule, dict[Node, Node]]]:
    """Yield the graphs that a node runs, as under no_grad or autocast, with their arguments."""
    for place, argument in enumerate(node.args):
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner = operator.attrgetter(str(argument.target))(graph_module)
            if isinstance(inner, fx.GraphModule):
                taken = inner.graph.find_nodes(op="placeholder")
                pairs = zip(taken, node.args[place + 1 :], strict=False)
                yield inner, {own: given for own, given in pairs if isinstance(given, Node)}


def _changed_by(node: Node) -> Iterator[Node]:
    """Yield the arguments that the node changes in place."""
    if not isinstance(node.target, OpOverload) or node.target is _aten.detach_.default:
        return  # Detaching a tensor does not change its values.
    hidden, condition = _HIDDEN_WRITES.get(node.target, ((), 0))
    for number, (argument, value) in enumerate(_arguments(node)):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if number in hidden and node.args[condition]:
            is_written = True
        if is_written:
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node))


def _changed_within(node: Node, graph_module: fx.GraphModule) -> Iterator[Node]:
    """Yield the arguments that change in a graph that the node runs."""
    for inner, given in graphs_within(node, graph_module):
        changed = Aliases(inner).changed_roots
        yield from (value for own, value in given.items() if own in changed)
