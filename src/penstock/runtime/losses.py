"""The losses of a step's microbatches, on the rank of the last stage."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.backward.settling import PLAIN_TYPES
from penstock.backward.structure import describe
from penstock.comm.collective_results import values_of, waited
from penstock.errors import StageError
from penstock.ir import MicrobatchId
from penstock.microbatches.loss_weights import LossWeight, LossWeights, find_weights
from penstock.runtime.own_loss import Counted, Labels, OwnLoss
from penstock.runtime.step_settings import Batch, LossFn
from penstock.stage.passage import needs_grad
from penstock.torch_private import pytree


@dataclass(slots=True)
class Losses:
    """The losses of a step's microbatches; `values` has those computed so far."""

    loss_fn: LossFn | None
    batch: Batch
    weights: LossWeights
    has_backward: bool
    adds_losses: bool = False
    """True if several losses may be returned, whose sum is trained, as in torch's schedules."""
    values: dict[MicrobatchId, Any] = field(default_factory=dict)
    _trains_anything: bool = False
    """True if the loss of some microbatch needs a gradient."""
    _shapes: list[torch.Size] | None = None
    """The shapes of the first outputs, where nothing else shows the sizes of microbatches."""

    def compute(self, mb: MicrobatchId, outputs: Any) -> Tensor | None:
        """Compute the loss of a microbatch; return it if its backward follows."""
        if self.loss_fn is None:
            return None
        with torch.set_grad_enabled(self.has_backward):
            target = self.batch.targets[mb] if self.batch.targets else None
            try:
                loss = self.loss_fn(outputs, target, **self.batch.loss_kwargs)
            except Exception as exc:
                if target is None:
                    exc.add_note("no target was given on this rank, which holds the last stage")
                raise
        self.values[mb] = waited(loss) if self.has_backward else _value_alone(waited(loss))
        if self.weights.settle is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            self.weights = self.weights.settle(mb, outputs, self.values[mb])
        if not self.has_backward:
            return None
        if self.adds_losses and not isinstance(loss, Tensor):
            loss = _sum_of(loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            got = describe(loss) if isinstance(loss, Tensor) else f"{loss!r}"
            raise StageError(
                f"loss_fn returned a loss {got} for microbatch {mb}. Expected a tensor with one "
                "real value: let it return the mean, or the sum with scale_grads=False."
            )
        if not self.weights.are_known:
            self._check_alike(mb, outputs)
        if not loss.requires_grad and any(map(needs_grad, pytree.tree_leaves(outputs))):
            raise StageError(
                f"loss_fn returned a loss that does not need a gradient for microbatch {mb}, "
                "although the outputs do, so nothing would be trained. Compute it from the "
                "outputs, without detach() or item()."
            )
        self._trains_anything |= loss.requires_grad
        if len(self.values) == len(self.weights.seeds):
            self._check_trains_anything()
        return loss

    def seed(self, mb: MicrobatchId, loss: Tensor) -> Tensor | None:
        """Return the gradient that the backward of a loss begins with; None if it needs none."""
        if not loss.requires_grad:
            return None
        return torch.full_like(loss, self.weights.seeds[mb], requires_grad=False)

    def counts(self, mb: MicrobatchId) -> bool:
        """Return whether a microbatch has any weight in the loss of the batch."""
        return self.weights.seeds[mb] != 0

    def let_go(self, mb: MicrobatchId) -> None:
        """Keep only the value of a loss: its graph would keep the stage's inputs alive."""
        self.values[mb] = pytree.tree_map_only(
            Tensor, lambda loss: _value_alone(values_of(loss)), self.values[mb]
        )

    def weighed(self) -> list[Any]:
        """Return the losses times their weights, so that their mean is the loss of the batch."""
        return [self.weights.weigh(mb, self.values[mb]) for mb in sorted(self.values)]

    def _check_trains_anything(self) -> None:
        """Raise an error if no loss needs a gradient; torch's own schedules say nothing."""
        if not (self._trains_anything or self.adds_losses):
            raise StageError(
                f"none of the losses of all {len(self.values)} microbatches needs a gradient, so "
                "nothing would be trained: all parameters that the outputs depend on are frozen, "
                "or the outputs are detached or whole numbers. Train at least one of them, or run "
                "the batch without a backward: by eval() of a pipeline, or evaluate() of a "
                "ParallelModel."
            )

    def _check_alike(self, mb: MicrobatchId, outputs: Any) -> None:
        """Raise an error if microbatches differ in size, so that they should not count equally."""
        shapes = [leaf.shape for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes:
            raise StageError(
                f"the outputs of microbatch {mb} have shapes {list(map(tuple, shapes))}, but those "
                f"of the first one have {list(map(tuple, self._shapes))}, so their losses should "
                "not count equally. Expected equal shapes, or another way to find the sizes on "
                "this rank, which holds the last stage. Give step() the target here, or give "
                "step_microbatches() the weights; or let loss_fn return sums, with "
                "scale_grads=False."
            )


def _sum_of(losses: Any) -> Any:
    """Return the sum of all losses that need a gradient; what was given if there are none."""
    parts = [leaf for leaf in pytree.tree_leaves(losses) if needs_grad(leaf)]
    return sum(parts[1:], parts[0]) if parts else losses


def _value_alone(loss: Any) -> Any:
    """Return a loss in memory of its own size; it is copied only if it takes more.

    On the CPU, `mse_loss` and its like return one value in the memory of all that they reduced.
    """
    if type(loss) in PLAIN_TYPES and loss.untyped_storage().nbytes() > loss.nbytes:
        return loss.clone()
    return loss


def mean_of(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of a step's losses, in their own dtype, or in 32 bits."""
    found = torch.stack([each.detach().reshape(()) for each in losses])
    return found.mean(dtype=torch.promote_types(found.dtype, torch.float32))


SumOver: TypeAlias = Callable[[Sequence[float]], tuple[Sequence[float], int]]
"""Sums totals over replicas; returns the sums, and the number of replicas."""


def weigh_losses(
    batch: Batch,
    num_microbatches: int,
    *,
    loss_fn: LossFn,
    weights: Any,
    rule: LossWeight | None,
    are_cut: bool,
    sum_over: SumOver | None,
) -> LossWeights:
    """Find out how much each microbatch counts; `sum_over` sums totals over replicas."""
    found = find_weights(
        {"target": batch.targets, "kwargs": batch.kwargs, "args": batch.args},
        weights=weights,
        rule=rule,
        are_cut=are_cut,
    )
    own = [1.0] * num_microbatches if found is None else found
    sum_over = sum_over or (lambda totals: (totals, 1))
    if isinstance(loss_fn, OwnLoss) and weights is None and rule is None:
        labels = Labels.of(batch.kwargs)
        return _weigh_labels(loss_fn, labels, own, sum_over, are_known=found is not None)
    (total,), num_replicas = sum_over([sum(own)])
    return LossWeights.of(own, total, num_replicas, are_known=found is not None)


def _weigh_labels(
    loss_fn: OwnLoss,
    labels: Labels | None,
    sizes: Sequence[float],
    sum_over: SumOver,
    *,
    are_known: bool,
) -> LossWeights:
    """Weigh losses that the model computes; by their sizes if no labels are known.

    All replicas sum the same totals, whatever each of them knows.
    """
    counts = dict.fromkeys(Counted, sizes) if labels is None else labels.counts()
    ways = [sizes, *counts.values()]
    totals, num_replicas = sum_over(list(map(sum, ways)))
    if labels is None or _have_same_shares(ways, totals):
        return LossWeights.of(sizes, totals[0], num_replicas, are_known=are_known)
    weights = {
        way: partial(LossWeights.of, counts[way], total, num_replicas)
        for way, total in zip(counts, totals[1:], strict=True)
    }
    if loss_fn.counted is not None:
        return weights[loss_fn.counted]()

    def settle(mb: MicrobatchId, output: Any, loss: Tensor) -> LossWeights:
        if loss_fn.learn(output, loss, labels.parts[mb]):
            assert loss_fn.counted is not None
            return weights[loss_fn.counted]()
        return unsettled

    unsettled = replace(weights[Counted.ALL](), settle=settle)
    return unsettled


def _have_same_shares(ways: Sequence[Sequence[float]], totals: Sequence[float]) -> bool:
    """Return whether each microbatch has the same share in the total, whatever is counted."""
    return 0 not in totals and all(
        math.isclose(part / total, parts[0] / totals[0])
        for parts in zip(*ways, strict=True)
        for part, total in zip(parts, totals, strict=True)
    )
