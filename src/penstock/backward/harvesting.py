"""Find the weight gradients in a finished autograd graph that can be deferred.

The *input side* of the graph is every node from which a stage input can be reached: the
nodes that an input backward runs. If such a node also has an edge to a part of the
graph that leads to parameters only, it *uses* those parameters:

    loss ── ... ── Addmm ── ... ── x          input side
                     ├── bias                 off it: parameters only
                     └── T ── weight

If we have a source for every node that uses a parameter, autograd need not compute its
gradient: a pre-hook takes the gradient that arrives at the node in the single engine pass
of I, and W does the rest. The gradient of any other parameter is computed in that same
pass, and only added in W. Parameters that share a node, or a part off the input side,
form a cluster and are treated alike, so that no gradient is lost or counted twice.

This runs for every microbatch, between two engine passes, so it is written for speed:
accumulators are never visited, and dictionaries are keyed by `id`, since hashing a tensor
costs more than the lookup.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.backward.sources import Source, Use, source_of
from penstock.errors import BackwardError
from penstock.torch_private import accumulated_variable, sequence_number

Edges: TypeAlias = Sequence[tuple[Node | None, int]]


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge where a tensor's gradient arrives: at its node, or a leaf's accumulator."""
    if tensor.grad_fn is not None:
        return GradientEdge(tensor.grad_fn, tensor.output_nr)
    with torch.enable_grad():
        view = tensor.view_as(tensor).grad_fn
    if view is None:
        raise BackwardError(
            "a backward was started inside torch.inference_mode(), which records no graphs. "
            "Start it outside."
        )
    (accumulator, _), *_ = view.next_functions
    assert accumulator is not None
    return GradientEdge(accumulator, 0)


_Accumulator: type[Node] = type(gradient_edge(torch.empty(0, requires_grad=True)).node)


class User(NamedTuple):
    """A node of the input side that uses parameters; without a source, autograd must run it."""

    node: Node
    source: Source | None
    params: Sequence[Tensor]


class Cluster:
    """Parameters that are deferred together or not at all, and everything that leads to them.

    `users`: nodes of the input side. `tails`: the indices of roots off the input side.
    """

    __slots__ = ("params", "tails", "users")

    def __init__(self) -> None:
        self.params: dict[int, Tensor] = {}
        self.users: list[User] = []
        self.tails: list[int] = []

    def absorb(self, other: "Cluster") -> None:
        self.params.update(other.params)
        self.users += other.users
        self.tails += other.tails

    def can_wait(self) -> bool:
        return all(user.source is not None for user in self.users)


def harvest(
    roots: Sequence[GradientEdge], inputs: Iterable[GradientEdge], weights: Iterable[Tensor]
) -> list[Cluster]:
    """Return the clusters of all weights that the roots lead to, in time linear in the graph."""
    graph = _Graph([root.node for root in roots], {edge.node for edge in inputs})
    params = _Parameters(graph, weights)
    clusters: dict[int, Cluster] = {}
    for node in graph.users():
        user = _user(node, graph, params)
        if user is not None:
            _cluster_of(user.params, clusters).users.append(user)
    for number, root in enumerate(roots):
        below = () if root.node in graph.input_side else params.below(root.node)
        if below:
            _cluster_of(below, clusters).tails.append(number)
    found = list({id(cluster): cluster for cluster in clusters.values()}.values())
    for cluster in found:
        if len(cluster.users) > 1:  # Autograd runs them, and adds their gradients, in this order.
            cluster.users.sort(key=lambda user: sequence_number(user.node), reverse=True)
    return found


class _Graph:
    """All nodes that the roots lead to, except accumulators, and which are on the input side."""

    __slots__ = ("_above_leaves", "_parents", "edges", "input_side", "inputs")

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
        self.inputs = inputs
        self.edges = edges = dict[Node, Edges]()
        self._parents = parents = dict[Node, list[Node]]()
        self._above_leaves = above_leaves = dict[Node, None]()
        self.input_side = input_side = set[Node]()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in edges:
                continue
            if node in inputs:
                input_side.add(node)
            edges[node] = following = node.next_functions
            for child, _ in following:
                if child is None:
                    continue
                if type(child) is _Accumulator:
                    if child in inputs:
                        input_side.add(node)
                    else:
                        above_leaves[node] = None
                elif child in parents:
                    parents[child].append(node)
                else:
                    parents[child] = [node]
                    stack.append(child)
        self._complete(input_side)

    def _complete(self, nodes: set[Node]) -> None:
        """Add all nodes that lead to those in `nodes`."""
        parents = self._parents
        stack = list(nodes)
        while stack:
            for parent in parents.get(stack.pop(), ()):
                if parent not in nodes:
                    nodes.add(parent)
                    stack.append(parent)

    def users(self) -> Iterable[Node]:
        """Return nodes of the input side that may use parameters, directly or through others."""
        found: dict[Node, None] = {}
        stack = list(self._above_leaves)
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node in self.input_side:
                found[node] = None
                continue
            for parent in self._parents.get(node, ()):
                if parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
        return found


class _Parameters:
    """The weights that nodes off the input side lead to."""

    __slots__ = ("_below", "_graph", "_weights")

    def __init__(self, graph: _Graph, weights: Iterable[Tensor]) -> None:
        self._graph = graph
        self._weights = {id(weight) for weight in weights}
        self._below: dict[Node, Sequence[Tensor]] = {}

    def of(self, node: Node | None) -> Tensor | None:
        """Return the weight that this node accumulates into, or None."""
        if type(node) is not _Accumulator:
            return None
        variable = accumulated_variable(node)
        return variable if id(variable) in self._weights else None

    def of_transpose(self, node: Node) -> Tensor | None:
        """Return the weight whose transpose this node made, or None."""
        if type(node).__name__ != "TBackward0":
            return None
        return self.of(self._graph.edges[node][0][0])

    def below(self, node: Node) -> Sequence[Tensor]:
        """Return all weights that can be reached from a node off the input side."""
        known = self._below.get(node)
        if known is not None:
            return known
        found: dict[int, Tensor] = {}
        seen = {node}
        stack = [node]
        while stack:
            current = stack.pop()
            param = self.of(current)
            if param is not None:
                found[id(param)] = param
            for child, _ in self._graph.edges.get(current, ()):
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
        self._below[node] = params = tuple(found.values())
        return params


def _user(node: Node, graph: _Graph, params: _Parameters) -> User | None:
    """Return the node as a user of parameters, or None if it is not one."""
    uses: list[Use] = []
    used: list[Tensor] = []
    is_passed = False  # The pass stops at an input that does not lead to another input.
    for number, (child, output_nr) in enumerate(graph.edges[node]):
        if child is None:
            continue
        if child in graph.input_side or child in graph.inputs:
            is_passed = True
            continue
        if (param := params.of(child)) is not None:
            uses.append(Use(number, param, False))
            used.append(param)
        elif (param := params.of_transpose(child)) is not None:
            uses.append(Use(number, param, True))
            used.append(param)
        elif below := params.below(child):
            uses.append(Use(number, GradientEdge(child, output_nr), False))
            used.extend(below)
    if not uses:
        return None
    return User(node, source_of(node, uses) if is_passed else None, used)


def _cluster_of(params: Sequence[Tensor], clusters: dict[int, Cluster]) -> Cluster:
    """Return one cluster of all these parameters: a new one, or their clusters joined."""
    host: Cluster | None = None
    for param in params:
        other = clusters.get(id(param))
        if host is None:
            host = other
        elif other is not None and other is not host:
            host.absorb(other)
            clusters.update(dict.fromkeys(other.params, host))
    if host is None:
        host = Cluster()
    for param in params:
        host.params[id(param)] = param
        clusters[id(param)] = host
    return host
