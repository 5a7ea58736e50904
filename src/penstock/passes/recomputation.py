"""Recompute forwards for their backwards, so that less is kept in between."""

from collections.abc import Callable, Iterator

from penstock.errors import ScheduleError
from penstock.ir import Action, MicrobatchId, Recompute, Schedule, StageId
from penstock.ir.action import URGENT_BACKWARD_TYPES, compute_parts, recomputed_by


def add_recompute(
    schedule: Schedule,
    only: Callable[[StageId, MicrobatchId], bool] = lambda stage, mb: True,
) -> Schedule:
    """Recompute forwards right before their backwards, where nothing is kept for longest.

    `only` says for which stages and microbatches; for all by default. Those that are recomputed
    already stay where they are.

    >>> print(add_recompute(Schedule.from_csv("0F0,0B0\\n1F0,1B0\\n"), lambda s, mb: s == 0))
    rank 0  0F0 0R0 .   0B0
    rank 1  .   1F0 1B0
    """
    if not schedule.has_backward:
        raise ScheduleError(
            "The schedule has no backwards, so nothing needs to be recomputed. Give one that "
            "trains, such as 1F1B."
        )
    return schedule.with_orders(_with_recompute(order, only) for order in schedule.orders)


def remove_recompute(schedule: Schedule) -> Schedule:
    """Return the schedule with forwards that keep what their backwards need."""
    return schedule.with_orders(
        [action for action in order if not isinstance(action, Recompute)]
        for order in schedule.orders
    )


def _with_recompute(
    order: tuple[Action, ...], only: Callable[[StageId, MicrobatchId], bool]
) -> Iterator[Action]:
    known = recomputed_by(order)
    for action in order:
        for part in compute_parts(action):
            place = part.stage, part.mb
            if isinstance(part, URGENT_BACKWARD_TYPES) and place not in known and only(*place):
                yield Recompute(*place)
        yield action
