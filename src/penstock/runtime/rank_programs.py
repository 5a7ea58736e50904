"""The programs of a rank's steps, for its stages as they are now."""

from functools import cached_property

from penstock.ir import Rank, Schedule, Skip, StageId
from penstock.passes.simpler_orders import keep_forwards
from penstock.runtime.program import Program, make_program


class Programs:
    """A rank's programs for one schedule, given which of its stages are sharded.

    Their channels are those of `training`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: Rank,
        skips: frozenset[Skip],
        sharded: frozenset[StageId],
    ) -> None:
        self._schedule = schedule
        self.skips = skips
        self.sharded = sharded
        self.training = make_program(schedule, rank, skips, sharded)

    @cached_property
    def forward(self) -> Program:
        """The program of an evaluation, made when there is one."""
        return make_program(keep_forwards(self._schedule), self.training.rank, self.skips)
