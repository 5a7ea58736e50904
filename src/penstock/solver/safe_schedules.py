"""Schedules for any placement that need little memory, to run before costs are known."""

from collections.abc import Collection, Sequence

from penstock.costs import CostTable
from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    Schedule,
    StageId,
)
from penstock.passes import add_recompute
from penstock.passes.backward_halves import join_backward
from penstock.passes.simpler_orders import part_overlaps
from penstock.sim import simulate
from penstock.solver.problem import Problem
from penstock.solver.registered_schedules import registered


def safe_schedule(placement: Placement, num_microbatches: int) -> Schedule:
    """Return the registered schedule for this placement that holds least, with full backwards.

    If no algorithm has this placement, run one microbatch at a time.
    """
    found = [
        whole
        for _, schedule in registered(placement, num_microbatches)
        if can_run(whole := join_backward(part_overlaps(schedule)))
    ]
    if not found:
        return one_at_a_time(placement, num_microbatches)

    def cost(schedule: Schedule) -> tuple[float, float]:
        report = simulate(schedule)
        return round(report.peak_memory, 9), report.makespan

    return min(found, key=cost)


def can_run(
    schedule: Schedule, costs: CostTable | None = None, memory: Sequence[float] | None = None
) -> bool:
    """Return whether a schedule verifies, within the memory of each rank if that is given."""
    try:
        schedule.verify(costs=costs, memory=memory)
    except ScheduleError:
        return False
    return True


def least_memory(problem: Problem) -> Schedule:
    """Return the schedule that fits if any does: one microbatch at a time."""
    shape = problem.placement, problem.num_microbatches
    schedule = one_at_a_time(*shape, problem.better_split)
    dropped = problem.better_dropped
    return add_recompute(schedule, lambda stage, mb: stage in dropped) if dropped else schedule


def one_at_a_time(
    placement: Placement, num_microbatches: int, split: Collection[StageId] = ()
) -> Schedule:
    """Return the schedule that ends each microbatch before the next begins.

    None holds less, with W right after I on the stages in `split`, if that takes less memory there.
    """
    stages = range(placement.num_stages)
    orders: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for mb in range(num_microbatches):
        for stage in stages:
            orders[placement.ranks[stage]].append(Forward(stage, mb))
        for stage in reversed(stages):
            order = orders[placement.ranks[stage]]
            if stage in split:
                order += [BackwardInput(stage, mb), BackwardWeight(stage, mb)]
            else:
                order.append(Backward(stage, mb))
    return Schedule(orders, placement, num_microbatches)
