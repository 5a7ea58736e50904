"""The loss on held-out data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.training.loader import Sequences, held_out_batches


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation."""

    step: int
    """The step after which it was done."""
    loss: float
    """The mean over all tokens that were held out."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class Evaluation:
    """The batches to evaluate on, the same every time."""

    def __init__(self, sequences: Sequences, batch: int, most: int) -> None:
        """Take the first `most` batches, or all if it is 0."""
        self._sequences = sequences
        self._places = held_out_batches(sequences, batch)[: most or None]

    def run(self, step: int, evaluate: Callable[[Tensor, Tensor], Tensor]) -> Evaluated:
        """Return the mean of what `evaluate` returns for each batch."""
        losses = [evaluate(*self._sequences.rows(places)).item() for places in self._places]
        return Evaluated(step, math.fsum(losses) / len(losses))
