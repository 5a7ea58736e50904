"""What flows between the stages of a marked graph.

    forward:  a ── b ──┆── c ──┆── d        ┆ is a mark; d uses a and c
    stage 0 gives b to stage 1 and a to stage 2;  stage 1 gives c to stage 2

A value goes from the stage that makes it to the first one that uses it, from there to the next
one that does, and so on. What is made of constants alone is not sent: every stage that uses it
makes it again.
"""

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from penstock.errors import PartitionError
from penstock.ir import StageId
from penstock.trace.marks import MARK, check_marks

_aten = torch.ops.aten
# Operations that run a graph within the graph.
_CONTEXTS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
# Arguments that these operations change, if the argument in the third column is true; their
# schemas do not say so.
_HIDDEN_WRITES = {
    _aten.batch_norm.default: ((3, 4), 5),
    _aten.instance_norm.default: ((3, 4), 5),
}


@dataclass(frozen=True, slots=True)
class Flow:
    """For a marked graph: what each stage takes, computes and gives."""

    num_stages: int
    computed: tuple[tuple[Node, ...], ...]
    """By stage, the nodes that it computes."""
    given: dict[tuple[StageId, StageId], list[Node]]
    """The values that one stage gives to another, in the order of the graph."""
    constants: frozenset[Node]
    """Nodes that are made again in every stage that uses them."""
    written: tuple[tuple[Node, ...], ...]
    """By stage, the values that come to it and that it changes in place."""

    def taken(self, stage: StageId) -> list[Node]:
        """The values that come to a stage, those of the first stage first."""
        sources = range(stage)
        return [node for source in sources for node in self.given.get((source, stage), ())]

    def given_by(self, stage: StageId) -> list[Node]:
        """The values that go from a stage to others, those for the next stage first."""
        targets = range(stage + 1, self.num_stages)
        return [node for target in targets for node in self.given.get((stage, target), ())]


def find_flow(graph_module: fx.GraphModule) -> Flow:
    """The flow of a marked graph; raises if it cannot be cut at its marks."""
    check_marks(graph_module)
    graph = graph_module.graph
    aliases = _Aliases(graph_module)
    constants = frozenset(_constants(graph_module, aliases))
    stage_of = _stages(graph, constants)
    num_stages = 1 + sum(node.target is MARK for node in graph.nodes)
    values = [node for node in graph.nodes if node in stage_of and node.op != "output"]
    given: dict[tuple[StageId, StageId], list[Node]] = {}
    for node in values:
        users = {stage_of[user] for user in node.users if user in stage_of}
        for edge in pairwise(sorted(users | {stage_of[node]})):
            given.setdefault(edge, []).append(node)
    computed = tuple(
        tuple(node for node in values if stage_of[node] == stage and node.op != "placeholder")
        for stage in range(num_stages)
    )
    _check_stages(computed, given)
    flow = Flow(num_stages, computed, given, constants, ())
    inputs = graph.find_nodes(op="placeholder")
    written = tuple(
        tuple(aliases.written_among(nodes, flow.taken(stage) if stage else inputs))
        for stage, nodes in enumerate(computed)
    )
    for stage, nodes in enumerate(written):
        _check_aliases(aliases, stage, flow.taken(stage), nodes)
    _check_buffers(aliases, graph, stage_of)
    return replace(flow, written=written)


def find_constants(graph_module: fx.GraphModule) -> frozenset[Node]:
    """The nodes of a graph that every stage makes again that uses them."""
    return frozenset(_constants(graph_module, _Aliases(graph_module)))


def find_bound(graph_module: fx.GraphModule) -> list[set[Node]]:
    """Nodes that one stage must have together: all that use a buffer which the forward changes."""
    aliases = _Aliases(graph_module)
    attributes = graph_module.graph.find_nodes(op="get_attr")
    return [_all_users(node, aliases) for node in attributes if node in aliases.changed_roots]


class _Aliases:
    """Which nodes share memory with which, and which operations change it."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.root: dict[Node, Node] = {}
        self.changed: dict[Node, list[Node]] = {}
        """By operation, what it changes in place."""
        for node in graph_module.graph.nodes:
            source = _aliased(node, graph_module)
            self.root[node] = node if source is None else self.root[source]
            self.changed[node] = [*_changed_by(node), *_changed_within(node, graph_module)]
        self.changed_roots = {
            self.root[changed] for nodes in self.changed.values() for changed in nodes
        }

    def written_among(self, nodes: Iterable[Node], values: Iterable[Node]) -> list[Node]:
        """Those of `values` whose memory one of `nodes` changes."""
        roots = {self.root[changed] for node in nodes for changed in self.changed[node]}
        return [value for value in values if self.root[value] in roots]


def _aliased(node: Node, graph_module: fx.GraphModule) -> Node | None:
    """The node whose memory this one's result may share."""
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        if source.target in _CONTEXTS:
            return _aliased_within(source, node.args[1], graph_module)
        return source if _aliased(source, graph_module) is not None else None
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
            # Dropout that is off, say, returns its input.
            return next(iter(node.all_input_nodes), None)
        if not any(result.alias_info for result in node.target._schema.returns):
            return None
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and isinstance(value, Node):
                return value
    return None


def _aliased_within(node: Node, number: Any, graph_module: fx.GraphModule) -> Node | None:
    """The argument of a node that runs a graph, whose memory one of its results may share."""
    for inner, given in _graphs_within(node, graph_module):
        (output,) = inner.graph.find_nodes(op="output")
        return given.get(_Aliases(inner).root[output.args[0][number]])
    return None


def _graphs_within(
    node: Node, graph_module: fx.GraphModule
) -> Iterator[tuple[fx.GraphModule, dict[Node, Node]]]:
    """The graphs that a node runs, under no_grad or autocast, say, with what they are given."""
    for place, argument in enumerate(node.args):
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner = operator.attrgetter(str(argument.target))(graph_module)
            if isinstance(inner, fx.GraphModule):
                taken = inner.graph.find_nodes(op="placeholder")
                pairs = zip(taken, node.args[place + 1 :], strict=False)
                yield inner, {own: given for own, given in pairs if isinstance(given, Node)}


def _changed_by(node: Node) -> Iterator[Node]:
    """The arguments that the node changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is _aten.detach_.default:
        return  # A tensor that is detached keeps its values.
    hidden, condition = _HIDDEN_WRITES.get(node.target, ((), 0))
    for number, value in enumerate(node.args):
        argument = node.target._schema.arguments[number]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if number in hidden and node.args[condition]:
            is_written = True
        if is_written and isinstance(value, Node):
            yield value


def _changed_within(node: Node, graph_module: fx.GraphModule) -> Iterator[Node]:
    """The arguments that change in a graph that the node runs."""
    for inner, given in _graphs_within(node, graph_module):
        changed = _Aliases(inner).changed_roots
        yield from (value for own, value in given.items() if own in changed)


def _constants(graph_module: fx.GraphModule, aliases: _Aliases) -> Iterator[Node]:
    """Nodes that need no input and no parameter, and whose values are always the same."""
    found: set[Node] = set()
    for node in graph_module.graph.nodes:
        if aliases.root[node] in aliases.changed_roots:
            continue
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(graph_module)
            is_constant = not isinstance(value, Tensor) or not value.requires_grad
        else:
            is_pure = _is_pure(node, graph_module)
            is_constant = is_pure and found.issuperset(node.all_input_nodes)
        if is_constant:
            found.add(node)
            yield node


def _is_pure(node: Node, graph_module: fx.GraphModule) -> bool:
    """Whether an operation does nothing but compute its result, the same each time."""
    if node.op != "call_function" or node.target is MARK:
        return False
    if node.target in _CONTEXTS:
        return all(
            _is_pure(step, inner)
            for inner, _ in _graphs_within(node, graph_module)
            for step in inner.graph.nodes
            if step.op == "call_function"
        )
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") == "_operator"
    impure = {torch.Tag.nondeterministic_seeded, torch.Tag.maybe_aliasing_or_mutating}
    return bool(node.target._schema.returns) and not impure.intersection(node.target.tags)


def _stages(graph: fx.Graph, constants: frozenset[Node]) -> dict[Node, StageId]:
    """The stage that computes each node. The output is the last stage's."""
    stage, found = 0, {}
    for node in graph.nodes:
        if node.target is MARK:
            stage += 1
        elif node.op == "placeholder":
            found[node] = 0
        elif node.op != "get_attr" and node not in constants:
            source = _followed(node)
            found[node] = found.get(source, stage) if source is not None else stage
    return found


def _followed(node: Node) -> Node | None:
    """The node in whose stage this one is, wherever it stands."""
    if node.target is operator.getitem:  # A part of a result is taken where the result is.
        source = node.args[0]
    elif node.target is _aten.copy_.default and not node.users:
        # A buffer that was assigned gets its new value at the end of the graph.
        source = node.args[1]
    else:
        return None
    return source if isinstance(source, Node) else None


def _check_stages(
    computed: tuple[tuple[Node, ...], ...], given: Collection[tuple[StageId, StageId]]
) -> None:
    for stage, nodes in enumerate(computed):
        if not nodes:
            raise PartitionError(
                f"stage {stage} would have nothing to compute: there is no operation between its "
                "two ends. Take one of the two cut points out, or move it."
            )
        if stage < len(computed) - 1 and stage not in {source for source, _ in given}:
            raise PartitionError(
                f"stage {stage} makes nothing that a later stage uses, so that it would be "
                "computed for nothing. Move the cut point behind it, or put what is not needed "
                "out of the model."
            )


def _check_aliases(
    aliases: _Aliases, stage: StageId, taken: Iterable[Node], written: Iterable[Node]
) -> None:
    for node in written:
        for other in taken:
            if other is not node and aliases.root[other] is aliases.root[node]:
                raise PartitionError(
                    f"stage {stage} changes {node.name!r} in place, of which {other.name!r} is a "
                    "view that is used too; both come from earlier stages, as copies that do not "
                    "share memory. Cut the model elsewhere, or do not change it in place."
                )


def _check_buffers(aliases: _Aliases, graph: fx.Graph, stage_of: dict[Node, StageId]) -> None:
    for node in graph.nodes:
        if node.op != "get_attr" or node not in aliases.changed_roots:
            continue
        users = {stage_of[user] for user in _all_users(node, aliases) if user in stage_of}
        if len(users) > 1:
            named = " and ".join(map(str, sorted(users)))
            raise PartitionError(
                f"{node.target!r} is changed in the forward and used in stages {named}, which "
                "would each change a copy of their own. Cut the model so that one stage has all "
                "that uses it."
            )


def _all_users(node: Node, aliases: _Aliases) -> set[Node]:
    """The users of a node, and of what shares its memory."""
    sharing = [other for other, root in aliases.root.items() if root is node]
    return {user for other in sharing for user in other.users}
