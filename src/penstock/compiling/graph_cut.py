"""Cut the graph of a backward in two: an input half and a weight half.

```
                    early                             late
given ──▶ gradients that others wait for    ──kept──▶ gradients of weights
(saved tensors, gradients of outputs)
```

Every node runs once, in one of the halves, except views: these cost nothing, so the weight half
makes them again from what they view, and the same tensor is not kept twice.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import SymInt, fx
from torch.fx import Node

_PRODUCTS = {
    "aten.addmm.default",
    "aten.baddbmm.default",
    "aten.bmm.default",
    "aten.convolution_backward.default",
    "aten.mm.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_mm.default",
}
"""Operations that make it worthwhile to let a gradient wait."""
_VIEWS = {
    "aten.expand.default",
    "aten.permute.default",
    "aten.reshape.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.t.default",
    "aten.transpose.int",
    "aten.unsqueeze.default",
    "aten.view.default",
    "aten._unsafe_view.default",
}
"""Views that are as large as what they view, or larger."""
_COLLECTIVES = ("_c10d_functional", "c10d")


class GraphCut(NamedTuple):
    """A backward graph, cut: the numbers of the outputs of each half, and both graphs.

    The input half takes all inputs; it returns its outputs, then what it `made` for the weight
    half. That takes these, then the inputs that are `passed` on, by number.
    """

    early_outputs: list[int]
    late_outputs: list[int]
    made: list[Node]
    passed: list[int]
    needs_parameters: bool
    input_half: fx.Graph
    weight_half: fx.Graph


def cut_graph(
    graph: fx.Graph, outputs: Sequence[Any], can_wait: Sequence[bool], parameters: Collection[Node]
) -> GraphCut | None:
    """Return the cut of a backward graph, or None if no weight gradient can wait.

    `can_wait` says of each output whether it is a weight's gradient. `parameters` are the inputs
    that are weights: their values may be gone when the weight half runs, so what needs them is
    computed early, except what comes after a product that can wait.
    """
    must = [out for out, wait in zip(outputs, can_wait, strict=True) if _is_node(out) and not wait]
    if not must or any(map(_overwrites, graph.nodes)):
        return None
    must += [node for node in graph.nodes if _has_effects(node)]
    bases = [_base(out) if _is_node(out) else None for out in outputs]
    waiting = [
        number
        for number, wait in enumerate(can_wait)
        # What others hold too must go through autograd, which copies it.
        if wait and bases[number] is not None and bases.count(bases[number]) == 1
    ]
    early = _early(must)
    own = {n: _ancestors([outputs[n]], early) for n in waiting if _ancestors([bases[n]], early)}
    products = [number for number, nodes in own.items() if any(map(_is_product, nodes))]
    if not products:
        return None
    late = _ancestors([outputs[number] for number in products], early)
    must += _uses_of(parameters, graph, late)
    early = _early(must)
    kept = _needed(_ancestors([outputs[number] for number in products], early))
    # Others, such as sums for biases, wait only if that keeps no more.
    waiting = [
        number
        for number in own
        if number in products or _needed(_ancestors([outputs[number]], early)) <= kept
    ]
    # Those that do not wait may compute what others need.
    must += [out for n, out in enumerate(outputs) if _is_node(out) and n not in waiting]
    early = _early(must)
    waiting = [number for number in waiting if _ancestors([bases[number]], early)]
    if not waiting:
        return None
    late = _ancestors([outputs[number] for number in waiting], early)
    return _extract_halves(graph, outputs, waiting, early, late, parameters)


def _extract_halves(
    graph: fx.Graph,
    outputs: Sequence[Any],
    waiting: Sequence[int],
    early: set[Node],
    late: set[Node],
    parameters: Collection[Node],
) -> GraphCut:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    # Inductor's cache relies on it that a graph with tensors of symbolic sizes takes the sizes too.
    kept = _needed(late) | set(filter(_is_size, inputs))
    made = [node for node in graph.nodes if node in kept and node in early]
    passed = [number for number, node in enumerate(inputs) if node in kept]
    others = [number for number in range(len(outputs)) if number not in waiting]
    again = _ancestors([n for node in late for n in node.all_input_nodes], late | kept)
    return GraphCut(
        early_outputs=others,
        late_outputs=list(waiting),
        made=made,
        passed=passed,
        needs_parameters=not kept.isdisjoint(parameters),
        input_half=_extract(graph, inputs, early, [*(outputs[n] for n in others), *made]),
        weight_half=_extract(
            graph,
            [*made, *(inputs[number] for number in passed)],
            late | again,
            [outputs[number] for number in waiting],
        ),
    )


def part_convolutions(graph: fx.Graph) -> None:
    """Split each convolution backward in two: the input's gradient, and the weight's and bias's."""
    for node in list(graph.nodes):
        if str(node.target) != "aten.convolution_backward.default":
            continue
        *args, (of_input, *of_weights) = node.args
        if not of_input or not any(of_weights):
            continue
        values = node.meta["val"]
        with graph.inserting_after(node):
            other = graph.call_function(node.target, (*args, [False, *of_weights]))
        other.meta = {**node.meta, "val": (None, *values[1:])}
        node.args = (*args, [True, False, False])
        node.meta["val"] = (values[0], None, None)
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] != 0:
                user.args = (other, user.args[1])


def _uses_of(parameters: Collection[Node], graph: fx.Graph, late: set[Node]) -> list[Node]:
    """Return the late nodes that use values of parameters, except products and what follows."""
    values = set(parameters)
    after_product: set[Node] = set()
    found = []
    for node in graph.nodes:
        if node not in late:
            if _is_view(node) and not values.isdisjoint(node.all_input_nodes):
                values.add(node)
            continue
        if _is_product(node) or not after_product.isdisjoint(node.all_input_nodes):
            after_product.add(node)
        elif not values.isdisjoint(node.all_input_nodes):
            if _is_view(node):
                values.add(node)
            else:
                found.append(node)
    return found


def _early(must: Iterable[Node]) -> set[Node]:
    """Return what must run early, with all results of nodes that have several."""
    found = _ancestors(must, ())
    for node in list(found):
        found |= {user for user in node.users if user.target is operator.getitem}
    return found


def _ancestors(nodes: Iterable[Node | None], stop: Collection[Node]) -> set[Node]:
    """Return the nodes and all that they are computed from, without inputs and `stop`."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in found or node in stop or node.op == "placeholder":
            continue
        found.add(node)
        stack += node.all_input_nodes
    return found


def _needed(late: set[Node]) -> set[Node]:
    """Return what the late nodes take from the inputs or from early nodes, below views."""
    found = set()
    stack = [node for user in late for node in user.all_input_nodes if node not in late]
    while stack:
        node = stack.pop()
        if node.op == "get_attr":
            continue
        if _is_view(node):
            stack += node.all_input_nodes
        else:
            found.add(node)
    return found


def _base(node: Node) -> Node | None:
    """Return what a view, or a view of a view, is of; None if it is an input.

    Unlike elsewhere, that includes parts of a tensor.
    """
    while _is_in_memory_of_another(node):
        node = node.all_input_nodes[0]
    return None if node.op == "placeholder" else node


def _is_in_memory_of_another(node: Node) -> bool:
    if node.target is operator.getitem:  # One of several parts, or one of several results.
        return _is_in_memory_of_another(node.all_input_nodes[0])
    return str(node.target) in _VIEWS or getattr(node.target, "is_view", False)


def _extract(
    graph: fx.Graph, inputs: Sequence[Node], nodes: Collection[Node], outputs: Sequence[Any]
) -> fx.Graph:
    """Return a graph of these nodes, from `inputs` to `outputs`."""
    new = fx.Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        # The name keeps code that may overwrite its inputs apart in inductor's cache, which finds
        # code by its graph alone: no input of a half may be overwritten.
        copies[node] = new.placeholder(f"unchanged_{node.name}")
        copies[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[out] if _is_node(out) else out for out in outputs))
    return new


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _is_product(node: Node) -> bool:
    return str(node.target) in _PRODUCTS


def _is_view(node: Node) -> bool:
    """Return whether a node costs nothing: it is a view, or computes a size from sizes."""
    return str(node.target) in _VIEWS or (
        node.op == "call_function" and all(_is_size(each) for each in (node, *node.all_input_nodes))
    )


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, SymInt))


def _overwrites(node: Node) -> bool:
    """Return whether a node changes an input in place, which the weight half might read later."""
    name, _, _ = str(node.target).rpartition(".")  # Such as aten.copy_.default.
    return node.op == "call_function" and name.endswith("_")


def _has_effects(node: Node) -> bool:
    """Return whether a node must stay where it is: it communicates, draws or overwrites."""
    if node.op != "call_function":
        return False
    return node.is_impure() or str(node.target).startswith(_COLLECTIVES)
