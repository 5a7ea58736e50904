"""The values that stages of a marked graph give each other.

    forward:  a ── b ──┆── c ──┆── d        ┆ is a mark; d uses a and c
    stage 0 gives b to stage 1 and a to stage 2;  stage 1 gives c to stage 2

A value goes from the stage that makes it to the first one that uses it, from there to the next
one that does, and so on. A value computed from constants alone is not sent: every stage that
uses it computes it again.
"""

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, fx
from torch.fx import Node

from penstock.cutting.aliases import CONTEXTS, Aliases, graphs_within
from penstock.cutting.marks import MARK, check_marks
from penstock.errors import PartitionError
from penstock.ir import StageId
from penstock.torch_private import OpOverload, schema_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Flow:
    """The values that each stage of a marked graph takes, computes and gives."""

    num_stages: int
    computed: tuple[tuple[Node, ...], ...]
    """The nodes that each stage computes."""
    given: dict[tuple[StageId, StageId], list[Node]]
    """The values that one stage gives to another, in the order of the graph."""
    constants: frozenset[Node]
    """Nodes that every stage that uses them computes again."""
    written: tuple[tuple[Node, ...], ...]
    """The values that each stage takes and changes in place."""

    def taken(self, stage: StageId) -> list[Node]:
        """Return the values that a stage takes, those from the first stage first."""
        sources = range(stage)
        return [node for source in sources for node in self.given.get((source, stage), ())]

    def given_by(self, stage: StageId) -> list[Node]:
        """Return the values that a stage gives to others, those for the next stage first."""
        targets = range(stage + 1, self.num_stages)
        return [node for target in targets for node in self.given.get((stage, target), ())]


def find_flow(graph_module: fx.GraphModule) -> Flow:
    """Return the flow of a marked graph; raise an error if it cannot be cut at its marks."""
    check_marks(graph_module)
    graph = graph_module.graph
    aliases = Aliases(graph_module)
    constants = find_constants(graph_module, aliases)
    stage_of = _stages(graph, constants)
    num_stages = 1 + sum(node.target is MARK for node in graph.nodes)
    values = [node for node in graph.nodes if node in stage_of and node.op != "output"]
    given: dict[tuple[StageId, StageId], list[Node]] = {}
    for node in values:
        users = {stage_of[user] for user in node.users if user in stage_of}
        for pair in pairwise(sorted(users | {stage_of[node]})):
            given.setdefault(pair, []).append(node)
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
    for stage, nodes in enumerate(computed):
        _check_aliases(aliases, stage, nodes, stage_of)
    _check_buffers(aliases, graph, stage_of)
    return replace(flow, written=written)


def find_bound(graph_module: fx.GraphModule, aliases: Aliases) -> list[set[Node]]:
    """Return sets of nodes that must be in one stage: the users of a buffer the forward changes."""
    attributes = graph_module.graph.find_nodes(op="get_attr")
    return [_all_users(node, aliases) for node in attributes if node in aliases.changed_roots]


def find_constants(graph_module: fx.GraphModule, aliases: Aliases) -> frozenset[Node]:
    """Return the nodes that need no input and no parameter, and always have the same values."""
    found: set[Node] = set()
    for node in graph_module.graph.nodes:
        if aliases.root[node] in aliases.changed_roots:
            continue
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(graph_module)
            is_constant = not isinstance(value, Tensor) or not value.requires_grad
        else:
            is_pure = not aliases.changed[node] and _is_pure(node, graph_module)
            is_constant = is_pure and found.issuperset(node.all_input_nodes)
        if is_constant:
            found.add(node)
    return frozenset(found)


def _is_pure(node: Node, graph_module: fx.GraphModule) -> bool:
    """Return whether an operation only computes its result, the same each time."""
    if node.op != "call_function" or node.target is MARK:
        return False
    if node.target in CONTEXTS:
        return all(
            _is_pure(step, inner)
            for inner, _ in graphs_within(node, graph_module)
            for step in inner.graph.nodes
            if step.op == "call_function"
        )
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", "") == "_operator"
    impure = {torch.Tag.nondeterministic_seeded, torch.Tag.maybe_aliasing_or_mutating}
    return bool(schema_of(node.target).returns) and not impure.intersection(node.target.tags)


def _stages(graph: fx.Graph, constants: frozenset[Node]) -> dict[Node, StageId]:
    """Return the stage that computes each node. The output belongs to the last stage."""
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
    """Return the node whose stage this one belongs to, wherever it is in the graph, or None."""
    if node.target is operator.getitem:  # A part of a result is taken where the result is.
        source = node.args[0]
    elif node.target is _aten.copy_.default and _is_attribute(node.args[0]):
        # A buffer that the forward assigns gets its new value at the end of the graph.
        source = node.args[1]
    else:
        return None
    return source if isinstance(source, Node) else None


def _is_attribute(argument: object) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _check_stages(
    computed: tuple[tuple[Node, ...], ...], given: Collection[tuple[StageId, StageId]]
) -> None:
    for stage, nodes in enumerate(computed):
        if not nodes:
            raise PartitionError(
                f"stage {stage} would have nothing to compute: the model has no operation between "
                "its start and its end. Move a cut point, or remove it."
            )
        if stage < len(computed) - 1 and stage not in {source for source, _ in given}:
            raise PartitionError(
                f"stage {stage} makes nothing that a later stage uses, so it would be computed "
                "for nothing. Move the cut point at its end, or remove what is not needed from "
                "the model."
            )


def _check_aliases(
    aliases: Aliases, stage: StageId, nodes: Iterable[Node], stage_of: dict[Node, StageId]
) -> None:
    """Raise an error if a stage changes memory that later uses see through another value."""
    for root in {aliases.root[changed] for node in nodes for changed in aliases.changed[node]}:
        seen = [
            node
            for node in stage_of
            if aliases.root[node] is root
            and stage_of[node] < stage
            and any(stage_of.get(user, 0) >= stage for user in node.users)
        ]
        if len(seen) > 1:
            first, second = seen[:2]
            raise PartitionError(
                f"stage {stage} changes memory in place that {first.name!r} and {second.name!r} "
                "share; both come from earlier stages, as copies that do not share memory. Cut "
                "the model elsewhere, or do not change it in place."
            )


def _check_buffers(aliases: Aliases, graph: fx.Graph, stage_of: dict[Node, StageId]) -> None:
    for node in graph.nodes:
        if node.op != "get_attr" or node not in aliases.changed_roots:
            continue
        users = {stage_of[user] for user in _all_users(node, aliases) if user in stage_of}
        if len(users) > 1:
            named = " and ".join(map(str, sorted(users)))
            raise PartitionError(
                f"{node.target!r} is changed in the forward and used in stages {named}, which "
                "would each change their own copy. Cut the model so that one stage has everything "
                "that uses it."
            )


def _all_users(node: Node, aliases: Aliases) -> set[Node]:
    """Return the users of a node, and of all nodes that share its memory."""
    sharing = [other for other, root in aliases.root.items() if root is node]
    return {user for other in sharing for user in other.users}
