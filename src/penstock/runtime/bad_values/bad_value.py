"""A value that is not finite, and where it appeared first."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from penstock.ir import MicrobatchId, Rank, StageId

Order: TypeAlias = tuple[int, ...]


class Phase(IntEnum):
    """The parts of a step, in the order in which a value passes through them."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2
    END = 3


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first value of a step that is not finite."""

    step: int
    """The number of the step of this pipeline, from 1 on."""
    value: str
    """"nan" or "inf"."""
    is_loss: bool
    """True if a loss is not finite, False if only gradients are not."""
    phase: Phase
    stage: StageId
    rank: Rank
    """The rank in its pipeline."""
    mb: MicrobatchId | None
    """The microbatch, as the caller counts them; None if it is not known."""
    place: str
    """The module, parameter or argument."""
    order: Order
    """The smallest is the first: in the forward the lowest stage, in the backward the highest."""
    replica: int | None = None
    """The number of the pipeline; None if there is only one."""
    is_skipped: bool = False
    """True if the gradients of the step were dropped, on all ranks."""

    def __str__(self) -> str:
        what = "the loss" if self.is_loss else "a gradient"
        where = f"stage {self.stage} (rank {self.rank}"
        where += ")" if self.replica is None else f" of pipeline {self.replica})"
        mb = "" if self.mb is None else f", microbatch {self.mb}"
        return (
            f"{what} of step {self.step} is not finite: {self.value} appeared first in "
            f"{_WORDS[self.phase]} of {where}{mb}, {self.place}"
        )

    def as_row(self) -> tuple[Any, ...]:
        """Return plain values that `of_row` takes, to send to other ranks."""
        return (
            *(self.step, self.value, self.is_loss, int(self.phase), self.stage, self.rank),
            *(self.mb, self.place, self.order, self.replica, self.is_skipped),
        )

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> "BadValue":
        """Return the value that `as_row` described."""
        step, value, is_loss, phase, *rest = row
        return cls(step, value, is_loss, Phase(phase), *rest)


_WORDS = {
    Phase.FORWARD: "the forward",
    Phase.BACKWARD: "the backward",
    Phase.WEIGHTS: "the weight backward",
    Phase.END: "the gradients",
}
