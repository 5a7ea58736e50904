"""Remove what a run does not need: backwards for inference, or overlaps."""

from collections.abc import Iterator

from penstock.ir import Action, Forward, LazyOrders, Reshard, Schedule, StageId, Unshard
from penstock.ir.action import compute_parts, parts


def keep_forwards(schedule: Schedule) -> Schedule:
    """Return only the forwards, in the same order on each rank, without sends and receives.

    Where a stage is gathered for forwards, the gather stays, and so does the end of it.
    """
    orders = schedule.orders
    if isinstance(orders, LazyOrders):
        return schedule.with_orders(orders.reduced(_forwards_and_gathers))
    return schedule.with_orders(map(_forwards_and_gathers, orders))


def part_overlaps(schedule: Schedule) -> Schedule:
    """Replace each overlap with its two halves, the forward first."""
    return schedule.with_orders(
        [part for action in order for part in parts(action)] for order in schedule.orders
    )


def _forwards_and_gathers(order: tuple[Action, ...]) -> Iterator[Action]:
    kept = _gathers_for_forwards(order)
    for position, action in enumerate(order):
        if position in kept:
            yield action
        for part in compute_parts(action):
            if isinstance(part, Forward):
                yield part


def _gathers_for_forwards(order: tuple[Action, ...]) -> set[int]:
    """Return the positions of the gathers between which and their frees a forward runs.

    The positions of these frees are among them.
    """
    kept: set[int] = set()
    gathered_at: dict[StageId, int] = {}
    for position, action in enumerate(order):
        if isinstance(action, Unshard):
            gathered_at[action.stage] = position
        elif isinstance(action, Reshard) and gathered_at.pop(action.stage, None) in kept:
            kept.add(position)
        for part in compute_parts(action):
            if isinstance(part, Forward) and part.stage in gathered_at:
                kept.add(gathered_at[part.stage])
    return kept
