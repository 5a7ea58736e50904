"""The input backward: one engine pass that computes the input gradients and what W needs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.groups import Gradients, ParamGroup
from penstock.backward.harvesting import Cluster, gradient_edge, harvest
from penstock.backward.settling import HooksPutOff
from penstock.backward.sources import Passage, Source
from penstock.torch_private import run_backward


class HalfPlan(NamedTuple):
    """The weights whose gradients wait until W, and those that the pass computes: see `harvest`."""

    waiting: Sequence[Cluster]
    urgent: Sequence[Tensor]


def plan_for(
    roots: Sequence[Tensor], inputs: Sequence[GradientEdge], weights: Sequence[Tensor]
) -> HalfPlan:
    """Return the plan that defers all that can wait, for the graph from `roots` to `inputs`."""
    waiting: list[Cluster] = []
    urgent: list[Tensor] = []
    for cluster in harvest([gradient_edge(root) for root in roots], inputs, weights):
        if cluster.can_wait():
            waiting.append(cluster)
        else:
            urgent += cluster.params.values()
    return HalfPlan(waiting, urgent)


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
    arrivals: list[list[list[Gradients]]] = []
    grads: Sequence[Tensor | None] = ()
    with HooksPutOff(plan.urgent):
        if plan.waiting:
            with _watching(plan.waiting) as arrivals:
                grads = run_backward(roots, root_grads, wanted) if wanted else ()
        elif wanted:
            grads = run_backward(roots, root_grads, wanted)
    groups: list[ParamGroup] = []
    for cluster, arrived in zip(plan.waiting, arrivals, strict=True):
        sources = [user.source for user in cluster.users if user.source is not None]
        arrived_grads: list[Gradients] = [given[0] if given else () for given in arrived]
        tails: list[Source] = [Passage(gradient_edge(roots[n])) for n in cluster.tails]
        tail_grads: list[Gradients] = [(root_grads[n],) for n in cluster.tails]
        groups.append(ParamGroup(cluster.params, sources + tails, arrived_grads + tail_grads))
    first_tap, first_urgent = len(inputs), len(inputs) + len(taps)
    return InputHalf(grads[:first_tap], grads[first_tap:first_urgent], grads[first_urgent:], groups)


@contextmanager
def _watching(clusters: Sequence[Cluster]) -> Iterator[list[list[list[Gradients]]]]:
    """Record the gradients that arrive, in one list for every user of every cluster.

    This takes pre-hooks: gradients that the engine captures at a node lack the changes of
    tensor hooks.
    """
    handles = []
    arrivals: list[list[list[Gradients]]] = []
    for cluster in clusters:
        lists: list[list[Gradients]] = []
        for user in cluster.users:
            lists.append([])
            handles.append(user.node.register_prehook(lists[-1].append))
        arrivals.append(lists)
    try:
        yield arrivals
    finally:
        for handle in handles:
            handle.remove()


def arrived_group(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[ParamGroup]:
    """Return a group of the parameters that got gradients in the pass, or none if none did."""
    arrived = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    if not arrived:
        return []
    by_id = {id(param): param for param, _ in arrived}
    sources = [Passage(param) for param, _ in arrived]
    return [ParamGroup(by_id, sources, [(grad,) for _, grad in arrived])]
