"""The pattern of a stage's autograd graph: numbers that say how nodes, weights and inputs connect.

Which weight gradients can wait follows from the pattern alone (see `harvest`), and microbatches
rarely differ in it. So a graph is walked once per microbatch, to read its pattern; what follows is
worked out once per pattern. A pattern holds nothing of the graph.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.backward.sources import SOURCE_KINDS
from penstock.errors import BackwardError
from penstock.torch_private import NODES, accumulated_variable

# Kinds of nodes. OTHER nodes are only passed through; it and the kinds after it have edges.
LEAF, NOTHING, OTHER, TRANSPOSE, PRODUCT = range(5)
# Leaves, if they are not the weight with this index.
NO_WEIGHT, INPUT = -1, -2
# Several numbers in one: a node's kind and number of edges, an edge's node and gradient.
PER_EDGE, PER_GRADIENT = 8, 2**32

_KINDS = {
    type(None): NOTHING,
    NODES.AccumulateGrad: LEAF,
    NODES.TBackward0: TRANSPOSE,
    **dict.fromkeys(SOURCE_KINDS, PRODUCT),
}


class Pattern(NamedTuple):
    """A graph in numbers: two graphs of one pattern differ only in what their nodes compute.

    Nodes have places, in the order in which the walk finds them. `roots` and `halts` are places.
    `numbers` has these for every node, one node after another:

        leaf     LEAF, and the index of its weight, or INPUT, or NO_WEIGHT
        nothing  NOTHING: where an edge leads nowhere
        others   their kind + PER_EDGE * the number of edges, and for each edge
                 the place of its node + PER_GRADIENT * the number of that node's gradient
    """

    roots: tuple[int, ...]
    numbers: tuple[int, ...]
    halts: tuple[int, ...]


class Reading(NamedTuple):
    """The nodes of a graph, each at its place, and the graph's pattern."""

    nodes: Sequence[Node]
    pattern: Pattern


def read_graph(
    roots: Sequence[Tensor],
    inputs: Sequence[Tensor],
    halts: Iterable[Node],
    weights: Sequence[Tensor],
) -> Reading:
    """Read the graph that the roots lead to; a pass ends at `inputs` and at the nodes `halts`."""
    leaves = {id(weight): index for index, weight in enumerate(weights)}
    all_halts = [*halts]
    for x in inputs:
        if x.grad_fn is not None:
            all_halts.append(x.grad_fn)
        elif torch.is_inference_mode_enabled():
            raise _in_inference_mode()
        else:
            leaves[id(x)] = INPUT
    ends = [root.grad_fn or gradient_edge(root).node for root in roots]
    nodes, places, numbers = _walk(ends, leaves)
    found_halts = {places[halt] for halt in all_halts if halt in places}
    pattern = Pattern(
        tuple([places[end] for end in ends]), tuple(numbers), tuple(sorted(found_halts))
    )
    return Reading(nodes, pattern)


def _walk(
    ends: Sequence[Node], leaves: dict[int, int]
) -> tuple[list[Node], dict[Node | None, int], list[int]]:
    """Return all nodes that `ends` lead to, their places, and the numbers of the pattern.

    This runs for every microbatch, so it takes few steps for a node. `leaves` has the ids of leaf
    tensors: hashing a tensor takes longer than the lookup.
    """
    nodes: list[Node] = list(dict.fromkeys(ends))
    places: dict[Node | None, int] = {node: place for place, node in enumerate(nodes)}
    count = len(nodes)
    numbers: list[int] = []
    add, found, place_of = numbers.append, nodes.append, places.setdefault
    kind_of, leaf_of = _KINDS.get, leaves.get
    for node in nodes:  # The list grows meanwhile.
        kind = kind_of(type(node), OTHER)
        if kind >= OTHER:
            edges = node.next_functions
            add(kind + PER_EDGE * len(edges))
            for child, gradient in edges:
                place = place_of(child, count)
                if place == count:
                    count += 1
                    found(child)  # type: ignore[arg-type]  # None is taken for a node of its own
                add(place + PER_GRADIENT * gradient if gradient else place)
        else:
            add(kind)
            if kind == LEAF:
                add(leaf_of(id(accumulated_variable(node)), NO_WEIGHT))
    return nodes, places, numbers


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge where a tensor's gradient arrives: at its node, or a leaf's accumulator."""
    if tensor.grad_fn is not None:
        return GradientEdge(tensor.grad_fn, tensor.output_nr)
    with torch.enable_grad():
        view = tensor.view_as(tensor).grad_fn
    if view is None:
        raise _in_inference_mode()
    (accumulator, _), *_ = view.next_functions
    assert accumulator is not None
    return GradientEdge(accumulator, 0)


def _in_inference_mode() -> BackwardError:
    return BackwardError(
        "a backward was started inside torch.inference_mode(), which records no graphs. "
        "Start it outside."
    )
