"""The loss that a model computes itself, and how much each of its microbatches counts.

A model of transformers that is given labels returns the mean over those that are not -100. Most
causal models leave out the first label of each row, and some do not. Which labels a model counts is
found where it matters, once: its loss for a microbatch is compared with the means over both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from penstock.comm.collective_results import waited
from penstock.errors import StageError
from penstock.torch_private import is_dtensor

IGNORED = -100
"""A label that does not count."""
_COUNT = "num_items_in_batch"
"""The argument by which a model divides its loss; then the caller says what it is the mean of."""
_CLOSE = 1e-5


class Counted(Enum):
    """The labels that count in a model's loss."""

    ALL = "all labels"
    ALL_BUT_FIRST = "all labels but the first of each row"


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of each microbatch."""

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, kwargs: Sequence[Mapping[str, Any]]) -> "Labels | None":
        """Find the labels among the arguments of each microbatch; None if there are none."""
        found = []
        for given in kwargs:
            labels = given.get("labels") if given.get("shift_labels") is None else None
            labels = given.get("shift_labels") if labels is None else labels
            if given.get(_COUNT) is not None or not isinstance(labels, Tensor):
                return None
            if labels.dim() == 0 or labels.is_floating_point() or labels.is_complex():
                return None
            found.append(labels)
        return cls(tuple(found)) if found else None

    def counts(self) -> dict[Counted, list[float]]:
        """Return how many labels count in each microbatch."""
        kept = [part.ne(IGNORED) for part in self.parts]
        rows = [[part.sum(), _without_first(part).sum()] for part in kept]
        table = torch.stack([count for row in rows for count in row]).tolist()
        return {
            Counted.ALL: list(map(float, table[::2])),
            Counted.ALL_BUT_FIRST: list(map(float, table[1::2])),
        }


class OwnLoss:
    """The loss that a model returns; called like any other `loss_fn`."""

    def __init__(self) -> None:
        self.counted: Counted | None = None
        """The labels that the model counts, once that is known."""

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss that a model has computed."""
        loss = _part_of(output, "loss")
        if loss is None:
            raise StageError(
                f"loss_fn is 'model', but the model returned a {type(output).__name__} without a "
                "loss. Give step() what the model computes it from, such as labels=…, or give "
                "parallelize() a loss_fn."
            )
        return loss

    def learn(self, output: Any, loss: Tensor, labels: Tensor) -> bool:
        """Find out from a microbatch which labels count; return whether it could show that.

        Raise an error if the loss is a mean over something else.
        """
        means = _means(_part_of(output, "logits"), labels)
        own = loss.detach().reshape(())
        is_broken = not torch.isfinite(own) and not any(
            torch.isfinite(mean) for found in means.values() for mean in found
        )
        if not labels.ne(IGNORED).any() or (means and is_broken):
            return False
        matching = [way for way, found in means.items() if any(_is_close(own, x) for x in found)]
        if len(matching) != 1:
            raise _unknown(own, means)
        self.counted = matching[0]
        return True


def _part_of(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _without_first(labels: Tensor) -> Tensor:
    return labels[..., 1:] if labels.dim() > 1 else labels


@torch.no_grad()
def _means(logits: Any, labels: Tensor) -> dict[Counted, list[Tensor]]:
    """Return the mean over the labels that count in each way, in 32 bits and in the logits' own.

    Empty if the logits are not those of the labels.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        return {}
    if is_dtensor(logits):
        logits = waited(logits.full_tensor())  # type: ignore[attr-defined]  # Of a DTensor.
    logits, labels = logits.detach(), labels.to(logits.device)
    ways = {Counted.ALL: (logits, labels)}
    if labels.dim() > 1:
        ways[Counted.ALL_BUT_FIRST] = logits[..., :-1, :], labels[..., 1:]
    dtypes = {logits.dtype, torch.promote_types(logits.dtype, torch.float32)}
    return {
        way: [
            torch.nn.functional.cross_entropy(
                own.to(dtype).flatten(0, -2), kept.flatten().long(), ignore_index=IGNORED
            )
            for dtype in dtypes
        ]
        for way, (own, kept) in ways.items()
    }


def _is_close(loss: Tensor, mean: Tensor) -> bool:
    one, other = loss.item(), mean.to(loss.dtype).item()
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE * _CLOSE)


def _unknown(loss: Tensor, means: Mapping[Counted, Sequence[Tensor]]) -> StageError:
    known = ", ".join(f"{found[0].item():.6g} over {way.value}" for way, found in means.items())
    compared = f"it is {loss.item():.6g}, and the cross-entropy of the logits is {known}"
    return StageError(
        "microbatches have different numbers of labels, and it is not known which of them the "
        f"model's own loss is the mean of: {compared if means else 'no logits belong to them'}. "
        "Expected microbatches with equal numbers of labels that are not -100, or a loss_weight: "
        "give step() the labels as target too, and parallelize() a loss_weight, such as "
        "lambda labels: (labels != -100).sum(), or another loss_fn."
    )
