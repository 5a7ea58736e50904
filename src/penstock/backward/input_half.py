"""The input half: one engine pass that gives the input gradients and what W will need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.groups import Gradients, ParamGroup
from penstock.backward.harvest import Cluster, gradient_edge, harvest
from penstock.backward.sources import Passage, Source


class Plan(NamedTuple):
    """Which weights can wait until W, and which the pass must give: see `harvest`."""

    waiting: list[tuple[Cluster, list[Source]]]
    urgent: Sequence[Tensor]


def plan_for(
    roots: Sequence[Tensor], inputs: Sequence[GradientEdge], weights: Sequence[Tensor]
) -> Plan:
    """The plan that puts off all that can wait, for the graph from `roots` to `inputs`."""
    waiting: list[tuple[Cluster, list[Source]]] = []
    urgent: list[Tensor] = []
    for cluster in harvest([gradient_edge(root) for root in roots], inputs, weights):
        sources = cluster.sources()
        if sources is None:
            urgent += cluster.params.values()
        else:
            waiting.append((cluster, sources))
    return Plan(waiting, urgent)


class Halved(NamedTuple):
    """What the pass gave: gradients of the inputs, at the taps and of the urgent weights,
    and groups of the weights that wait."""

    input_grads: Sequence[Tensor | None]
    tap_grads: Sequence[Tensor | None]
    urgent_grads: Sequence[Tensor | None]
    groups: list[ParamGroup]


def input_half(
    plan: Plan,
    roots: Sequence[Tensor],
    root_grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    taps: Sequence[GradientEdge] = (),
) -> Halved:
    """Run the pass. The graph is released as far as the pass goes; no hook of a weight runs."""
    wanted: Any = [*inputs, *taps, *plan.urgent]
    grads: Sequence[Tensor | None] = ()
    with _watching(plan) as arrivals, hooks_put_off(plan.urgent):
        if wanted:
            grads = torch.autograd.grad(roots, wanted, root_grads, allow_unused=True)
    first_tap, first_urgent = len(inputs), len(inputs) + len(taps)
    return Halved(
        grads[:first_tap],
        grads[first_tap:first_urgent],
        grads[first_urgent:],
        _waiting_groups(plan, arrivals, roots, root_grads),
    )


@contextmanager
def _watching(plan: Plan) -> Iterator[list[list[Gradients]]]:
    """Lists that take, for every user that can wait, the gradients that arrive there.

    By pre-hooks: what the engine captures at a node is not yet changed by tensor hooks.
    """
    handles = []
    arrivals: list[list[Gradients]] = []
    for cluster, _ in plan.waiting:
        for user in cluster.users:
            arrival: list[Gradients] = []
            handles.append(user.node.register_prehook(arrival.append))
            arrivals.append(arrival)
    try:
        yield arrivals
    finally:
        for handle in handles:
            handle.remove()


def _waiting_groups(
    plan: Plan,
    arrivals: list[list[Gradients]],
    roots: Sequence[Tensor],
    root_grads: Sequence[Tensor],
) -> list[ParamGroup]:
    groups = []
    remaining = iter(arrivals)
    for cluster, sources in plan.waiting:
        grads: list[Gradients] = []
        for _ in sources:
            arrival = next(remaining)
            grads.append(arrival[0] if arrival else ())
        for number in cluster.tails:
            sources.append(Passage(gradient_edge(roots[number])))
            grads.append((root_grads[number],))
        groups.append(ParamGroup(cluster.params, sources, grads))
    return groups


def arrived_group(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[ParamGroup]:
    """A group of the parameters that got their gradients in the pass; none if none did."""
    arrived = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    if not arrived:
        return []
    group = ParamGroup(
        {id(param): param for param, _ in arrived},
        [Passage(param) for param, _ in arrived],
        [(grad,) for _, grad in arrived],
    )
    return [group]


@contextmanager
def hooks_put_off(params: Sequence[Tensor]) -> Iterator[None]:
    """Take tensor hooks off the parameters: they belong to W, but the engine would run them now."""
    hooked = [(param, param._backward_hooks) for param in params if param._backward_hooks]
    for param, _ in hooked:
        param._backward_hooks = None
    try:
        yield
    finally:
        for param, hooks in hooked:
            param._backward_hooks = hooks
