"""The programs of a rank's steps, for its stages as they are."""

import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from penstock.ir import Rank, Schedule, StageId
from penstock.runtime.messages.routes import Skip
from penstock.runtime.program import Program, forward_only, make_program, split_stages


@dataclass(frozen=True, slots=True)
class Programs:
    """What a rank does in its steps, for one schedule and the stages that are compiled."""

    training: Program
    forward: Program
    compiled: frozenset[StageId]
    to_split: frozenset[StageId]
    """The stages whose backward the schedule splits."""

    @property
    def split(self) -> frozenset[StageId]:
        """The stages whose backward runs in two halves."""
        return self.to_split - self.compiled

    @property
    def whole(self) -> frozenset[StageId]:
        """The stages whose backward is to be split and cannot be, since they are compiled."""
        return self.to_split & self.compiled

    @classmethod
    def make(
        cls, schedule: Schedule, rank: Rank, compiled: frozenset[StageId], skips: Collection[Skip]
    ) -> "Programs":
        to_split = split_stages(schedule)
        return cls(
            training=make_program(schedule, rank, whole=compiled & to_split, skips=skips),
            forward=make_program(forward_only(schedule), rank, skips=skips),
            compiled=compiled,
            to_split=to_split,
        )


def warn_of_compiled(stages: Iterable[StageId]) -> None:
    for index in stages:
        warnings.warn(
            f"stage {index} is compiled, and the backward of a compiled module cannot be split "
            "yet: it runs full backwards, and leaves the schedule's bubbles to idle.",
            stacklevel=5,
        )
