"""The layers of a traced graph, which a policy does not divide.

A layer is a call of a module that is in a list or a Sequential, or of one that has no submodules.
Operations in the forward of a module that calls others belong to the layer before them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx import Node

from penstock.cutting.aliases import Aliases
from penstock.cutting.flow import find_bound, find_constants
from penstock.cutting.marks import MARK


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive operations of a graph, and the name of the module that they belong to."""

    name: str
    nodes: tuple[Node, ...]


def find_layers(graph_module: fx.GraphModule, at_least: int = 1) -> list[Layer]:
    """Return the layers in order; if there are fewer than `at_least`, divide entries of lists."""
    aliases = Aliases(graph_module)
    constants = find_constants(graph_module, aliases)
    operations = [
        node
        for node in graph_module.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output") and node not in constants
    ]
    bound = find_bound(graph_module, aliases)
    layers = _join(_group(operations, _outermost_entry), bound)
    return layers if len(layers) >= at_least else _join(_group(operations, _innermost), bound)


def mark_layers(graph_module: fx.GraphModule, starts: Iterable[Layer]) -> None:
    """Put a mark before each of these layers."""
    for layer in starts:
        with graph_module.graph.inserting_before(layer.nodes[0]):
            graph_module.graph.call_function(MARK)
    graph_module.recompile()


def _group(operations: Sequence[Node], name_of: Callable[[Node], str]) -> list[Layer]:
    """Return a layer for each run of equal names; operations of calling modules join a layer."""
    names = [name_of(node) for node in operations]
    callers = {prefix for name in names for prefix in _prefixes(name)}
    groups: list[tuple[str, list[Node]]] = []
    for node, name in zip(operations, names, strict=True):
        if groups and (name in callers or name == groups[-1][0]):
            groups[-1][1].append(node)
        elif groups and groups[-1][0] in callers:  # Only the first group can be a caller's.
            groups[-1] = (name, [*groups[-1][1], node])
        else:
            groups.append((name, [node]))
    return [Layer(name, tuple(nodes)) for name, nodes in groups]


def _join(layers: list[Layer], bound: Iterable[set[Node]]) -> list[Layer]:
    """Join layers that no cut may separate into one."""
    for nodes in bound:
        places = [place for place, layer in enumerate(layers) if not nodes.isdisjoint(layer.nodes)]
        if places:
            first, last = places[0], places[-1] + 1
            joined = tuple(node for layer in layers[first:last] for node in layer.nodes)
            layers = [*layers[:first], Layer(layers[first].name, joined), *layers[last:]]
    return layers


def _prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts))]


def _path(node: Node) -> list[str]:
    """Return the names of the modules that an operation is in, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(name) for name, _ in stack.values()]


def _outermost_entry(node: Node) -> str:
    for name in _path(node):
        if name.rpartition(".")[2].isdigit():
            return name
    return _innermost(node)


def _innermost(node: Node) -> str:
    path = _path(node)
    return path[-1] if path else ""
