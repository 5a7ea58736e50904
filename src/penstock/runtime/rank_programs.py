"""The programs of a rank's steps, for its stages as they are now."""

from dataclasses import dataclass

from penstock.ir import Rank, Schedule, Skip, StageId
from penstock.ir.message import Channel
from penstock.passes.simpler_orders import keep_forwards
from penstock.runtime.program import Program, make_program


@dataclass(frozen=True, slots=True)
class Programs:
    """A rank's programs for one schedule, given which of its stages are sharded."""

    training: Program
    forward: Program
    channels: frozenset[Channel]
    """The channels that any rank uses."""
    skips: frozenset[Skip]
    sharded: frozenset[StageId]

    @classmethod
    def make(
        cls,
        schedule: Schedule,
        rank: Rank,
        skips: frozenset[Skip],
        sharded: frozenset[StageId],
    ) -> "Programs":
        training = make_program(schedule, rank, skips, sharded)
        forward = make_program(keep_forwards(schedule), rank, skips)
        return cls(
            training=training,
            forward=forward,
            channels=training.channels | forward.channels,
            skips=skips,
            sharded=sharded,
        )
