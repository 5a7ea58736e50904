"""The arguments of torch 2.15's schedules about sharded stages and messages."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.passes import Gathers, add_gathers

_LOGGER = logging.getLogger(__name__)

DEFAULT_ACTIVE_STAGES = 3
Lookahead: TypeAlias = Literal["full", "auto"] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GatherLimits:
    """How many sharded stages a rank may have gathered, and how many it gathers early.

    `unshard_lookahead` counts the next different stages: "full" is as many as may be gathered,
    "auto" is two on rank 0 and one more on each later rank, and a tuple has a number for each rank.
    """

    max_active_stages: int = DEFAULT_ACTIVE_STAGES
    unshard_lookahead: Lookahead = "full"

    def __post_init__(self) -> None:
        most, lookahead = self.max_active_stages, self.unshard_lookahead
        if not _is_whole(most) or most < 1:
            raise ScheduleError(
                f"max_active_stages is {most!r}. Expected a whole number of stages, at least 1."
            )
        if isinstance(lookahead, tuple):
            for rank, count in enumerate(lookahead):
                if not _is_whole(count) or not 1 <= count <= most:
                    raise ScheduleError(
                        f"unshard_lookahead is {count!r} for rank {rank}. Expected a whole number "
                        f"of stages from 1 to max_active_stages, which is {most}."
                    )
        elif lookahead not in ("full", "auto"):
            raise ScheduleError(
                f'unshard_lookahead is {lookahead!r}. Expected "full", "auto", or a tuple with a '
                "number of stages for each rank."
            )

    def place(self, schedule: Schedule) -> Schedule:
        """Return the schedule with gathers that keep the limits.

        It stays as it is where no rank holds more stages than may be gathered, and nothing is said
        about when to gather: `reshard_after_forward` then decides.
        """
        counts = self._early_stages(schedule.num_ranks)
        most = self.max_active_stages
        if schedule.has_sharding:
            if counts != (most,) * schedule.num_ranks:
                raise ScheduleError(
                    f"unshard_lookahead is {self.unshard_lookahead!r}, but the order says itself "
                    "when stages are gathered. Leave the argument out, or give an order with "
                    "forwards and backwards only."
                )
            if most != DEFAULT_ACTIVE_STAGES:
                _LOGGER.warning(
                    "max_active_stages=%d has no effect: the order says when stages are gathered.",
                    most,
                )
            return schedule
        most_held = max(Counter(schedule.placement.ranks).values())
        if self.unshard_lookahead == "full" and most_held <= most:
            return schedule
        return add_gathers(schedule, [Gathers.at_most(most, stages_ahead=n) for n in counts])

    def _early_stages(self, num_ranks: int) -> tuple[int, ...]:
        """Return how many stages each rank gathers early."""
        lookahead, most = self.unshard_lookahead, self.max_active_stages
        if lookahead == "full":
            return (most,) * num_ranks
        if lookahead == "auto":
            return tuple(min(rank + 2, most) for rank in range(num_ranks))
        if len(lookahead) != num_ranks:
            raise ScheduleError(
                f"unshard_lookahead has {len(lookahead)} values, but there are {num_ranks} ranks. "
                "Give one for each rank."
            )
        return lookahead


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
