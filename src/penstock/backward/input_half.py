"""The input backward: one engine pass that computes the input gradients and what W needs."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.backward.graph_pattern import gradient_edge, read_graph
from penstock.backward.groups import Gradients, ParamGroup
from penstock.backward.harvesting import Cluster, Place, harvest
from penstock.backward.settling import HooksPutOff
from penstock.backward.sources import Passage, Source, Target, source_of
from penstock.torch_private import run_backward, sequence_number


class Deferred(NamedTuple):
    """A cluster whose gradients wait: its weights, the nodes that use them with their sources, and
    the indices of roots that lead only to it."""

    params: Sequence[Tensor]
    nodes: Sequence[Node]
    sources: list[Source]
    tails: Sequence[int]


class HalfPlan(NamedTuple):
    """The weights whose gradients wait until W, and those that the pass computes: see `harvest`."""

    waiting: Sequence[Deferred]
    urgent: Sequence[Tensor]


def plan_for(
    roots: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    halts: Iterable[Node] = (),
) -> HalfPlan:
    """Return the plan that defers all that can wait, for the graph from `roots` to `inputs`.

    `halts`: further nodes at which the pass ends.
    """
    nodes, pattern = read_graph(roots, inputs, halts, weights)
    clusters, always_urgent = harvest(pattern)
    waiting: list[Deferred] = []
    urgent = [weights[index] for index in always_urgent]
    for cluster in clusters:
        params = [weights[index] for index in cluster.weights]
        deferred = _defer(cluster, params, nodes, weights)
        if deferred is None:
            urgent += params
        else:
            waiting.append(deferred)
    return HalfPlan(waiting, urgent)


def _defer(
    cluster: Cluster, params: Sequence[Tensor], nodes: Sequence[Node], weights: Sequence[Tensor]
) -> Deferred | None:
    """Return the cluster of these parameters with its sources; None if one is missing."""
    users = cluster.users
    if len(users) > 1:  # Autograd runs them, and adds their gradients, in this order.
        users = tuple(sorted(users, key=lambda user: -sequence_number(nodes[user.place])))
    own_nodes: list[Node] = []
    sources: list[Source] = []
    for place, uses, planned, is_direct in users:
        targets: list[Target]
        if is_direct:
            targets = [weights[index] for index in planned]  # type: ignore[index]  # no Place
        else:
            targets = [_target(target, nodes, weights) for target in planned]
        node = nodes[place]
        source = source_of(node, uses, targets)
        if source is None:
            return None
        own_nodes.append(node)
        sources.append(source)
    return Deferred(params, own_nodes, sources, cluster.tails)


def _target(target: int | Place, nodes: Sequence[Node], weights: Sequence[Tensor]) -> Target:
    if isinstance(target, Place):
        return GradientEdge(nodes[target.place], target.number)
    return weights[target]


class InputHalf(NamedTuple):
    """The results of the pass: gradients of the inputs, at the taps and of the urgent weights,
    and groups of the weights that wait."""

    input_grads: Sequence[Tensor | None]
    tap_grads: Sequence[Tensor | None]
    urgent_grads: Sequence[Tensor | None]
    groups: list[ParamGroup]


def run_input_half(
    plan: HalfPlan,
    roots: Sequence[Tensor],
    root_grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    taps: Sequence[GradientEdge] = (),
) -> InputHalf:
    """Run the pass. It releases the part of the graph that it runs; no hook of a weight runs."""
    wanted = [*inputs, *taps, *plan.urgent]
    grads: Sequence[Tensor | None] = ()
    with HooksPutOff(plan.urgent), _Watch(plan.waiting) as arrivals:
        if wanted:
            grads = run_backward(roots, root_grads, wanted)
    groups = [
        _group(deferred, arrived, roots, root_grads)
        for deferred, arrived in zip(plan.waiting, arrivals, strict=True)
    ]
    first_tap, first_urgent = len(inputs), len(inputs) + len(taps)
    return InputHalf(grads[:first_tap], grads[first_tap:first_urgent], grads[first_urgent:], groups)


def _group(
    deferred: Deferred,
    arrived: Sequence[list[Gradients]],
    roots: Sequence[Tensor],
    root_grads: Sequence[Tensor],
) -> ParamGroup:
    params, _, sources, tails = deferred
    grads: list[Gradients] = [given[0] if given else () for given in arrived]
    for number in tails:
        sources.append(Passage(gradient_edge(roots[number])))
        grads.append((root_grads[number],))
    return ParamGroup(params, sources, grads)


class _Watch:
    """A context that records the gradients that arrive, in one list for every user.

    This takes pre-hooks: gradients that the engine captures at a node lack the changes of
    tensor hooks.
    """

    __slots__ = ("_handles", "_waiting")

    def __init__(self, waiting: Sequence[Deferred]) -> None:
        self._waiting = waiting
        self._handles: list[Any] = []

    def __enter__(self) -> list[list[list[Gradients]]]:
        arrivals: list[list[list[Gradients]]] = []
        for deferred in self._waiting:
            lists: list[list[Gradients]] = []
            for node in deferred.nodes:
                arrived: list[Gradients] = []
                self._handles.append(node.register_prehook(arrived.append))
                lists.append(arrived)
            arrivals.append(lists)
        return arrivals

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def arrived_group(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[ParamGroup]:
    """Return a group of the parameters that got gradients in the pass, or none if none did."""
    arrived = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    if not arrived:
        return []
    sources = [Passage(param) for param, _ in arrived]
    return [ParamGroup([param for param, _ in arrived], sources, [(grad,) for _, grad in arrived])]
