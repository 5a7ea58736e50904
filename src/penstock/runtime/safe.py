"""A schedule for any placement that holds little memory, to run before anything is known."""

from collections.abc import Iterator, Sequence

from penstock.costs import CostTable
from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Placement,
    Schedule,
)
from penstock.ir.action import compute_parts
from penstock.planner.one_at_a_time import one_at_a_time
from penstock.planner.registered import registered
from penstock.sim import simulate


def safe_schedule(placement: Placement, num_microbatches: int) -> Schedule:
    """The registered schedule for this placement that holds least, with full backwards.

    Where no algorithm is for the placement, one microbatch is under way at a time.
    """
    found = [
        whole
        for _, schedule in registered(placement, num_microbatches)
        if can_run(whole := _with_full_backwards(schedule))
    ]
    if not found:
        return one_at_a_time(placement, num_microbatches)

    def cost(schedule: Schedule) -> tuple[float, float]:
        report = simulate(schedule)
        return round(report.peak_memory, 9), report.makespan

    return min(found, key=cost)


def _with_full_backwards(schedule: Schedule) -> Schedule:
    """B where the schedule has I, and nothing where it has W; overlaps are taken apart."""

    def whole(order: tuple[Action, ...]) -> Iterator[Action]:
        for action in order:
            for part in compute_parts(action):
                if isinstance(part, BackwardInput):
                    yield Backward(part.stage, part.mb)
                elif not isinstance(part, BackwardWeight):
                    yield part

    orders = map(whole, schedule.orders)
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def can_run(
    schedule: Schedule, costs: CostTable | None = None, memory: Sequence[float] | None = None
) -> bool:
    """Whether a schedule verifies, within the memory of each rank if that is given."""
    try:
        schedule.verify(costs=costs, memory_cap=memory)
    except ScheduleError:
        return False
    return True
