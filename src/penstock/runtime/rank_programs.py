"""The programs of a rank's steps, for its stages as they are now."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.ir import Rank, Schedule, Skip, StageId
from penstock.ir.message import Channel
from penstock.passes.backward_halves import join_backward, split_stages
from penstock.passes.simpler_orders import keep_forwards
from penstock.runtime.program import Program, make_program


@dataclass(frozen=True, slots=True)
class Programs:
    """A rank's programs for one schedule, given which of its stages are compiled."""

    training: Program
    forward: Program
    channels: frozenset[Channel]
    """The channels that any rank uses."""
    skips: frozenset[Skip]
    compiled: frozenset[StageId]
    sharded: frozenset[StageId]
    to_split: frozenset[StageId]
    """The stages whose backward the schedule splits."""

    @property
    def split(self) -> frozenset[StageId]:
        """The stages whose backward runs in two halves."""
        return self.to_split - self.compiled

    @property
    def whole(self) -> frozenset[StageId]:
        """The stages that the schedule splits, but that run full backwards: they are compiled."""
        return self.to_split & self.compiled

    @classmethod
    def make(
        cls,
        schedule: Schedule,
        rank: Rank,
        compiled: frozenset[StageId],
        skips: frozenset[Skip],
        sharded: frozenset[StageId],
    ) -> "Programs":
        to_split = split_stages(schedule)
        training = make_program(join_backward(schedule, compiled & to_split), rank, skips, sharded)
        forward = make_program(keep_forwards(schedule), rank, skips)
        return cls(
            training=training,
            forward=forward,
            channels=training.channels | forward.channels,
            skips=skips,
            compiled=compiled,
            sharded=sharded,
            to_split=to_split,
        )


def warn_of_compiled(stages: Iterable[StageId]) -> None:
    for index in stages:
        warnings.warn(
            f"stage {index} is compiled, and the backward of a compiled module cannot be split "
            "yet: it runs full backwards, so the schedule's bubbles stay idle.",
            stacklevel=6,
        )
