"""The three functions: a stage's backward, whole or as an input half and a weight half.

They work on any graph that autograd built, with no preparation of the module. A runtime
that controls the forward as well is served faster by `SplitEngine`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.groups import ParamGroup
from penstock.backward.harvest import gradient_edge
from penstock.backward.input_half import arrived_group, input_half, plan_for
from penstock.backward.settle import settle, value_of
from penstock.backward.sources import Terms
from penstock.backward.structure import describe, pair_with_grads
from penstock.errors import BackwardError


def stage_backward(
    stage_output: Any, output_grads: Any, input_values: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The full backward: returns the inputs' gradients; parameters accumulate into `.grad`.

    `stage_output` may nest tuples, lists and dicts, and `output_grads` mirrors it; None
    for the whole of `output_grads` means that the outputs are losses. Values of
    `input_values` that are no tensors, or need no gradient, get None.

        >>> layer = torch.nn.Linear(2, 2)
        >>> x = torch.randn(3, 2, requires_grad=True)
        >>> (dx,) = stage_backward(layer(x).sum(), None, (x,))
        >>> dx.shape, layer.weight.grad.shape
        (torch.Size([3, 2]), torch.Size([2, 2]))
    """
    roots, root_grads = pair_with_grads(stage_output, output_grads)
    inputs = differentiable(input_values)
    for x in inputs:
        x.grad = None
        if not x.is_leaf:
            x.retain_grad()
    with explained(roots):
        if roots:
            torch.autograd.backward(roots, root_grads)
    grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return in_place_of(input_values, inputs, grads)


def stage_backward_input(
    stage_outputs_or_loss: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[ParamGroup]]:
    """The input half: returns the inputs' gradients and what the weight half will need.

    The inputs' `.grad` is set too (added to, if there is one); no `.grad` of `weights`
    changes and none of their hooks runs. The graph is released. The weight half may run
    at any time later, in any order among microbatches.

        >>> layer = torch.nn.Linear(2, 2)
        >>> x = torch.randn(3, 2, requires_grad=True)
        >>> (dx,), groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
        >>> layer.weight.grad is None
        True
        >>> _ = stage_backward_weight(layer.parameters(), groups)
        >>> layer.weight.grad.shape
        torch.Size([2, 2])
    """
    roots, root_grads = pair_with_grads(stage_outputs_or_loss, output_grads)
    inputs = differentiable(input_values)
    trainable = [weight for weight in weights if weight.requires_grad]
    with explained(roots):
        plan = plan_for(roots, [gradient_edge(x) for x in inputs], trainable)
        grads, _, urgent_grads, groups = input_half(plan, roots, root_grads, inputs)
        groups += arrived_group(plan.urgent, urgent_grads)
    for x, grad in zip(inputs, grads, strict=True):
        if grad is not None:
            before = x.grad if x.is_leaf or x.retains_grad else None
            x.grad = grad if before is None else before + grad
    return in_place_of(input_values, inputs, grads), groups


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: list[ParamGroup], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """The weight half: `weights` accumulate into `.grad`, and their hooks run; returns the grads.

    `param_groups` comes from one call of `stage_backward_input`, for the same weights. All
    it holds is freed, unless `retain_graph` asks to keep it for another run.
    """
    weights = list(weights)
    known = set(map(id, weights))
    terms: Terms = []
    for group in param_groups:
        group.check(known)
        group.add_terms(terms)
    with explained(value_of(term) for edge, term in terms if isinstance(edge, GradientEdge)):
        settle(terms, weights, signal_accumulators=_reducers_may_wait(), retain_graph=retain_graph)
    if not retain_graph:
        for group in param_groups:
            group.release()
    return tuple(weight.grad for weight in weights)


def _reducers_may_wait() -> bool:
    """Whether a data-parallel reducer may have put hooks on accumulators, which nobody can see."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def explained(outputs: Iterable[Tensor]) -> Iterator[None]:
    """Turn autograd's complaints about what cannot be run backward into errors of ours.

    `outputs`: the stage outputs, or tensors like them, that the message is to describe.
    """
    try:
        yield
    except RuntimeError as exc:
        if any(text in str(exc) for text in ("a second time", "already been freed")):
            shapes = ", ".join(describe(output) for output in outputs)
            raise BackwardError(
                f"the graph of the stage outputs ({shapes}) has been released by an earlier "
                "backward. A backward needs a forward of its own: run the stage's forward again."
            ) from exc
        if "use_reentrant=True" in str(exc):
            raise BackwardError(
                "the stage uses torch.utils.checkpoint with use_reentrant=True, whose backward "
                "cannot be split. Pass use_reentrant=False."
            ) from exc
        raise


def differentiable(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among the values that require gradients, each once."""
    found = (value for value in values if isinstance(value, Tensor) and value.requires_grad)
    return list(dict.fromkeys(found))


def in_place_of(
    values: Sequence[Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    grad_of = dict(zip(inputs, grads, strict=True))
    return tuple(grad_of.get(value) if isinstance(value, Tensor) else None for value in values)
