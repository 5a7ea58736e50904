"""Three functions: a stage's full backward, its input backward and its weight backward.

They work on any graph that autograd built, without preparing the module. For a runtime
that also controls the forward, `SplitEngine` is faster.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.backward.groups import ParamGroup
from penstock.backward.input_half import arrived_group, plan_for, run_input_half
from penstock.backward.settling import carry_on, settle
from penstock.backward.sources import WeightWork
from penstock.backward.structure import describe, differentiable, pair_with_grads, spread_over
from penstock.backward.translate import Translated
from penstock.backward.wrappers import is_sharded_graph
from penstock.errors import BackwardError
from penstock.torch_private import run_backward


def stage_backward(
    stage_output: Any, output_grads: Any, input_values: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Run the full backward; return the inputs' gradients and add the parameters' to `.grad`.

    `stage_output` may nest tuples, lists and dicts, and `output_grads` mirrors it. If
    `output_grads` is None, the outputs are losses. Values of `input_values` that are not
    tensors, or do not need a gradient, get None; the `.grad` of the others is cleared.

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
    if roots:
        try:  # Every microbatch runs through here: a context would take longer.
            run_backward(roots, root_grads)
        except RuntimeError as error:
            Translated(roots).translate(error)
            raise
    grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return spread_over(input_values, inputs, grads)


def stage_backward_input(
    stage_outputs_or_loss: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[ParamGroup]]:
    """Run the input backward; return the inputs' gradients and groups for the weight backward.

    The inputs' `.grad` is set too (or added to, if there is one). No `.grad` of `weights`
    changes, and none of their hooks runs. The graph is released. The weight backward may run
    at any later time, in any order among microbatches.

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
    for weight in trainable:
        if not weight.is_leaf:
            raise BackwardError(
                f"weights holds a tensor {describe(weight)} that was computed from others; "
                "expected parameters, which are leaves. Pass module.parameters()."
            )
    if is_sharded_graph(roots):
        raise BackwardError(
            "the stage's parameters are sharded by fully_shard (FSDP2) or replicate, whose split "
            "backward is not supported: the weight backward would run after they are freed. Use "
            "stage_backward, or a stage that is not sharded."
        )
    with Translated(roots):
        plan = plan_for(roots, inputs, trainable)
        grads, _, urgent_grads, groups = run_input_half(plan, roots, root_grads, inputs)
        groups += arrived_group(plan.urgent, urgent_grads)
    for x, grad in zip(inputs, grads, strict=True):
        if grad is not None:
            before = x.grad if x.is_leaf or x.retains_grad else None
            x.grad = grad if before is None else before + grad
    return spread_over(input_values, inputs, grads), groups


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: list[ParamGroup], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Run the weight backward: add to the `.grad` of `weights`, run their hooks, return the grads.

    `param_groups` comes from one call of `stage_backward_input`, for the same weights.
    Everything it holds is freed, unless `retain_graph` keeps it for another run.
    """
    weights = list(weights)
    known = set(map(id, weights))
    work = WeightWork([], [])
    for group in param_groups:
        group.check(known)
    unmodified = [group.unmodified for group in param_groups]
    for group in param_groups:
        group.add_work(work)
        if not retain_graph:
            group.release()
    terms, tails = work
    if tails:
        with Translated(grad for _, grad in tails if isinstance(grad, Tensor)):
            terms += carry_on(tails, weights, retain_graph=retain_graph)

    def recheck() -> None:
        for found in unmodified:
            found.check()

    settle(terms, signal_accumulators=_reducers_may_wait(), recheck=recheck)
    return tuple([weight.grad for weight in weights])


def _reducers_may_wait() -> bool:
    """Return whether a data-parallel reducer may have put hidden hooks on accumulators."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
