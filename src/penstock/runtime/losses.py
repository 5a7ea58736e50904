"""The losses of a step's microbatches, on the rank of the last stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.backward.structure import describe
from penstock.comm.collective_results import values_of, waited
from penstock.errors import StageError
from penstock.ir import MicrobatchId
from penstock.microbatches.loss_weights import LossWeight, LossWeights, find_weights
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
    if type(loss) is Tensor and loss.untyped_storage().nbytes() > loss.nbytes:
        return loss.clone()
    return loss


def mean_of(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of a step's losses, in their own dtype, or in 32 bits."""
    found = torch.stack([each.detach().reshape(()) for each in losses])
    return found.mean(dtype=torch.promote_types(found.dtype, torch.float32))


def weigh_losses(
    batch: Batch,
    num_microbatches: int,
    *,
    weights: Any,
    rule: LossWeight | None,
    are_cut: bool,
    sum_over: Callable[[float], tuple[float, int]] | None,
) -> LossWeights:
    """Find out how much each microbatch counts; `sum_over` sums a total over replicas."""
    found = find_weights(
        {"target": batch.targets, "kwargs": batch.kwargs, "args": batch.args},
        weights=weights,
        rule=rule,
        are_cut=are_cut,
    )
    own = [1.0] * num_microbatches if found is None else found
    total, num_replicas = (sum(own), 1) if sum_over is None else sum_over(sum(own))
    return LossWeights.of(own, total, num_replicas, are_known=found is not None)
