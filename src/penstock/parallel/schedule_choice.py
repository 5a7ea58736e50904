"""The schedule of a model, and the placement of its stages."""

from dataclasses import dataclass

from penstock import schedules
from penstock.errors import ScheduleError
from penstock.ir import Placement, Schedule
from penstock.runtime import Auto
from penstock.schedules.given_shape import find_mismatch, is_auto, placement_of_auto


@dataclass(frozen=True, slots=True)
class Choice:
    """The placement of the stages, and what `Pipeline` takes as its schedule."""

    placement: Placement
    schedule: Schedule | Auto
    num_microbatches: int


def choose_schedule(
    schedule: Schedule | Auto | str,
    *,
    num_ranks: int,
    num_microbatches: int | None,
    batch_size: int,
    stages_per_rank: int | None,
) -> Choice:
    """Return the schedule for a number of ranks; a name stands for the one that it makes."""
    if isinstance(schedule, Schedule):
        return _given(schedule, num_ranks, num_microbatches, stages_per_rank)
    count = default_microbatches(num_ranks, batch_size)
    if num_microbatches is not None:
        count = num_microbatches
    if is_auto(schedule):
        schedule = Auto()
    if isinstance(schedule, Auto):
        return Choice(placement_of_auto(num_ranks, stages_per_rank), schedule, count)
    made = schedules.get(schedule)(
        num_ranks=num_ranks, num_microbatches=count, stages_per_rank=stages_per_rank
    )
    return Choice(made.placement, made, count)


def default_microbatches(num_ranks: int, batch_size: int) -> int:
    """Return twice the number of ranks, or less if a batch cannot be cut into that many.

    >>> default_microbatches(4, 64), default_microbatches(4, 6)
    (8, 6)
    """
    most = range(1, min(2 * num_ranks, batch_size) + 1)
    return max((count for count in most if batch_size % count == 0), default=1)


def _given(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int | None,
    stages_per_rank: int | None,
) -> Choice:
    wrong = find_mismatch(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    if wrong is not None:
        name = "the number of ranks" if wrong.name == "num_ranks" else wrong.name
        raise ScheduleError(
            f"{name} is {wrong.given}, but the schedule is for {wrong.found}. Make the schedule "
            "for that number, or give the name of one, such as schedule='ZB-V'."
        )
    return Choice(schedule.placement, schedule, schedule.num_microbatches)
