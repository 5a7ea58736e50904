"""The bound by what a rank does between its first backward and its last forward."""

from dataclasses import replace

import pytest

from penstock import CostTable, Placement, Schedule, simulate
from penstock.solver import Problem
from penstock.solver.highest_point import Vector, highest
from penstock.solver.window_bounds import window_bound

# Four ranks, of which each holds one microbatch: F and B of the other ranks are waited for.
ALONE = CostTable.uniform(4, backward_weight=0.0, after_input=0.0, after_forward=10.0)


def test_highest_point_of_a_roof_is_found() -> None:
    """The least of five planes has its ridge at 0.25, 0.5, and falls by 1 in each direction."""

    def roof(point: Vector) -> tuple[float, Vector]:
        planes = []
        for i, ridge in enumerate((0.25, 0.5)):
            for sign in (1.0, -1.0):
                slope = tuple(sign * (n == i) for n in range(2))
                planes.append((sign * (point[i] - ridge), slope))
        least, slope = min(planes)
        return 3 + least, slope

    assert 3 == pytest.approx(highest(roof, (1.0, 1.0), 100), abs=1e-3)


def test_rank_that_holds_one_microbatch_waits_for_each() -> None:
    """Before its first backward, rank 0 can run one F, and after its last F one backward."""
    problem = Problem.of(ALONE, Placement.linear(4), 2, memory=10.0)
    assert 12 <= window_bound(problem) <= 16  # 16 is what it takes.


def test_memory_for_all_leaves_only_the_work_and_the_way() -> None:
    problem = Problem.of(ALONE, Placement.linear(4), 3, memory=30.0)
    assert 3 * 2 + 6 >= window_bound(problem) >= 3 * 2


def test_dropped_microbatches_count_as_work() -> None:
    """In 13, rank 0 keeps one microbatch, and has dropped all others before its first backward."""
    costs = replace(ALONE, after_dropping=(1.0,) * 4)
    waits, works = (
        window_bound(Problem.of(costs, Placement.linear(4), 12, memory=cap, recompute=True))
        for cap in (13.0, 40.0)
    )
    assert waits > works >= 24


def test_microbatches_may_be_dropped_until_after_the_last_forward() -> None:
    """Messages take long: rank 0 has 4 microbatches on the way, and room to keep one of them.

    After its last F, it recomputes and runs the backwards of 4 while it waits. If what it holds
    then had to be kept, it could run only one of these backwards there, and take 28.3 or more.
    """
    costs = CostTable(
        forward=[1, 0.25],
        backward_input=[1, 0.25],
        backward_weight=[0, 0],
        after_forward=[10, 10],
        after_input=[0, 0],
        after_dropping=[3, 10],
        recompute=[0.25, 0.25],
        delay=4,
    )
    first = "0F0,0F1,0F2,0F3," + ",".join(f"0R{mb},0B{mb},0F{mb + 4}" for mb in range(4))
    first += "," + ",".join(f"0R{mb},0B{mb}" for mb in range(4, 8))
    second = ",".join(f"1F{mb},1B{mb}" for mb in range(8))
    schedule, memory = Schedule.from_csv(f"{first}\n{second}\n"), [19.0, 10.0]
    schedule.verify(costs=costs, memory=memory)
    report = simulate(schedule, costs)
    assert 27.75 == report.makespan
    problem = Problem.of(costs, schedule.placement, 8, memory=memory, recompute=True)
    assert 22 < window_bound(problem) <= report.makespan


def test_no_limit_no_bound() -> None:
    assert 0 == window_bound(Problem.of(ALONE, Placement.linear(4), 2))


def test_uneven_microbatches_are_bound_by_their_own_times() -> None:
    """By span, rank 1 counts from its own start; the largest microbatch must fit."""
    for clock in ("makespan", "span"):
        costs = replace(ALONE, time_scale=((1.0, 3.0),) * 4, memory_scale=(1.0, 2.0))
        problem = Problem.of(costs, Placement.linear(4), 2, memory=20.0, clock=clock)
        assert 8 < window_bound(problem) <= 4 * 2 * (1 + 3)
