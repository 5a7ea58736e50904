"""Leaves out what a run does not need: backwards for inference, or overlaps."""

from collections.abc import Iterator

from penstock.ir import Action, Forward, Schedule
from penstock.ir.action import compute_parts, parts


def keep_forwards(schedule: Schedule) -> Schedule:
    """The forwards alone, each rank's in the same order, without sends and receives."""

    def keep(order: tuple[Action, ...]) -> Iterator[Action]:
        for action in order:
            for part in compute_parts(action):
                if isinstance(part, Forward):
                    yield part

    return schedule.with_orders(map(keep, schedule.orders))


def part_overlaps(schedule: Schedule) -> Schedule:
    """The halves of each overlap one after the other, the forward first."""
    return schedule.with_orders(
        [part for action in order for part in parts(action)] for order in schedule.orders
    )
