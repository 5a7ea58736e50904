"""Loss weights: the share of each microbatch's loss in the loss of a step.

The loss of a step is sum(w_i * loss_i) / sum(w_i), where w_i is the *weight* of microbatch i: the
number of values that its loss is the mean of. So a step gives the gradients of the whole batch,
whatever the sizes of its microbatches. Weights come from the caller, else from the pipeline's rule
for a target, else from the number of elements of a cut tensor in each microbatch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from numbers import Real
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.timed_collectives import add_up_
from penstock.errors import MicrobatchError, StageError
from penstock.torch_private import pytree

LossWeight: TypeAlias = Callable[[Any], Any]
"""A rule that returns the weight of a microbatch, a number, for its target."""

_NARROW = (torch.float16, torch.bfloat16)
"""The dtypes in which a loss times its factor may overflow."""
_REMEDY = (
    "Give the pipeline a loss_weight, such as loss_weight=len, or step_microbatches the weights."
)


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The factors of each microbatch's loss, on the rank of the last stage.

    `seeds` is for the gradients, which are summed; `factors` is for the losses, whose mean is
    taken. `are_known` is False if the sizes of the microbatches are unknown: then they are taken
    to be equal.

    `settle(mb, output, loss)` is there if these weights are only right for microbatches without
    any labels, because the model's first loss is to show which of them count. It returns the
    weights of all.
    """

    seeds: Sequence[float]
    factors: Sequence[float]
    are_known: bool = True
    settle: "Callable[[int, Any, Tensor], LossWeights] | None" = None

    @classmethod
    def plain(cls, num_microbatches: int) -> "LossWeights":
        """Make the weights of a sum: every loss counts as it is."""
        ones = [1.0] * num_microbatches
        return cls(ones, ones)

    @classmethod
    def alike(cls, num_microbatches: int) -> "LossWeights":
        """Make the weights of a mean over microbatches of equal size."""
        return _alike(num_microbatches)

    @classmethod
    def of(
        cls, weights: Sequence[float], total: float, num_replicas: int, *, are_known: bool = True
    ) -> "LossWeights":
        """Make the weights of a mean over replicas, whose gradients are averaged afterwards."""
        if not total > 0:
            raise StageError(
                f"the weights of all microbatches are {list(weights)}, so no loss counts in this "
                "step. Expected at least one that is more than 0: leave out such a batch."
            )
        seeds = [weight * num_replicas / total for weight in weights]
        factors = [weight * num_replicas * len(weights) / total for weight in weights]
        return cls(seeds, factors, are_known)

    def scaled(self, factor: float) -> "LossWeights":
        """Return weights that multiply the gradients by a factor, and leave the losses alone."""
        if factor == 1:
            return self
        settle = self.settle
        return replace(
            self,
            seeds=[seed * factor for seed in self.seeds],
            settle=None if settle is None else lambda *given: settle(*given).scaled(factor),
        )

    def weigh(self, mb: int, loss: Any) -> Any:
        """Return a loss scaled so that the mean over microbatches is the loss of the step.

        A loss that is not one number is returned as it is.
        """
        factor = self.factors[mb]
        if isinstance(loss, Tensor):
            loss = loss.detach()
            if loss.numel() != 1 or all(each == 1 for each in self.factors):
                return loss
            if loss.dtype in _NARROW:
                loss = loss.float()
            return loss * factor if factor else torch.zeros_like(loss)
        if isinstance(loss, int | float) and factor != 1:
            return loss * factor if factor else 0.0
        return loss


@cache
def _alike(num_microbatches: int) -> LossWeights:
    """Make the weights that most ranks have in every step."""
    seeds = (1.0 / num_microbatches,) * num_microbatches
    return LossWeights(seeds, (1.0,) * num_microbatches)


def find_weights(
    given: Mapping[str, Sequence[Any]], *, weights: Any, rule: LossWeight | None, are_cut: bool
) -> list[float] | None:
    """Return the weight of each microbatch, or None if nothing shows their sizes.

    `given` has the microbatches' values by name; those that show the sizes best come first.
    """
    if weights is not None:
        return check_weights(weights, len(given["args"]))
    if rule is not None:
        return weights_by_rule(rule, given["target"])
    for name, values in given.items():
        found = weights_by_size(values, name=name, are_cut=are_cut)
        if found is not None:
            return found
    return None


def check_weights(weights: Any, num_microbatches: int) -> list[float]:
    """Return the weights that a caller or a rule gave, as numbers."""
    found = list(weights) if isinstance(weights, Sequence | Tensor) else [weights]
    if len(found) != num_microbatches:
        raise StageError(
            f"weights has {len(found)} values. Expected one for each of the {num_microbatches} "
            "microbatches."
        )
    if found and all(isinstance(weight, Tensor) and weight.numel() == 1 for weight in found):
        found = torch.stack([weight.detach().reshape(()).double() for weight in found]).tolist()
    for mb, weight in enumerate(found):
        if isinstance(weight, Tensor) and weight.numel() == 1:
            found[mb] = weight = weight.item()
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise StageError(
                f"the weight of microbatch {mb} is {weight!r}. Expected a number, at least 0: how "
                "many values its loss is the mean of."
            )
    return list(map(float, found))


def weights_by_rule(rule: LossWeight, targets: Sequence[Any]) -> list[float]:
    """Return the weight of each microbatch, by its target."""
    if not targets:
        raise StageError(
            "the pipeline has a loss_weight, but no target was given on this rank, which holds the "
            "last stage. Give a target, or set loss_weight to None."
        )
    return check_weights([rule(target) for target in targets], len(targets))


def weights_by_size(values: Sequence[Any], *, name: str, are_cut: bool) -> list[float] | None:
    """Return the number of elements of each microbatch, or None if `values` does not show it.

    `are_cut` is True if they were cut from one batch, along one dim of each tensor. Otherwise the
    numbers of rows must have the same proportions.
    """
    columns = _columns(values)
    found: dict[tuple[Fraction, ...], str] = {}
    for number, column in enumerate(columns):
        found.setdefault(_proportions([x.numel() for x in column]), f"elements of tensor {number}")
        if not are_cut:
            found.setdefault(_proportions([len(x) for x in column]), f"rows of tensor {number}")
    if len(found) > 1:
        raise MicrobatchError(
            f"the microbatches differ in size, and the tensors of {name} disagree on their shares: "
            + "; ".join(f"{', '.join(map(str, sizes))} ({how})" for sizes, how in found.items())
            + f". Expected the same shares from all. {_REMEDY}"
        )
    return [float(x.numel()) for x in columns[0]] if columns else None


def _columns(values: Sequence[Any]) -> list[list[Tensor]]:
    """Return the tensors that differ between microbatches: one list for each leaf."""
    leaves = [pytree.tree_leaves(value) for value in values]
    if len({len(row) for row in leaves}) != 1:
        return []
    return [
        list(column)
        for column in zip(*leaves, strict=True)
        if all(isinstance(x, Tensor) and x.dim() > 0 for x in column)
        and any(x.numel() > 0 for x in column)
        and (len(column) == 1 or any(x is not column[0] for x in column))
    ]


def _proportions(sizes: Sequence[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(size, sum(sizes)) for size in sizes)


def sum_over_replicas(
    totals: Sequence[float], group: dist.ProcessGroup, device: torch.device, timeout_s: float
) -> list[float]:
    """Return the sums of the totals of all replicas; each must call it in each of its steps."""
    values = torch.tensor(totals, dtype=torch.float64, device=device)
    add_up_(
        values,
        group,
        timeout_s,
        what="the loss weights",
        expected="all of them, which are replicas, to run the same steps",
    )
    found: list[float] = values.tolist()
    return found


def average_over_replicas_(loss: Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Put the mean of the losses of all replicas into a tensor; each must call it."""
    add_up_(
        loss,
        group,
        timeout_s,
        what="the loss",
        expected="all of them, which are replicas, to run the same steps",
    )
    loss /= dist.get_world_size(group)
