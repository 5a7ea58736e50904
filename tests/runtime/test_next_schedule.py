"""What is chosen for given costs and memory, and the schedule that runs before."""

import re
from dataclasses import replace

import pytest

from fuzzing import rotated
from penstock import CostTable, Placement, schedules, simulate
from penstock.errors import ScheduleError
from penstock.ir import Backward, Forward
from penstock.ir.action import compute_parts
from penstock.runtime.auto.next_schedule import Outlook, choose_next
from penstock.runtime.auto.seen_work import UNKNOWN, SeenWork
from penstock.runtime.microbatch_order import order_by_work
from penstock.solver import Problem
from penstock.solver.safe_schedules import one_at_a_time, safe_schedule

SHAPES = [
    Placement(ranks)
    for ranks in (
        (0,),
        (0, 1),
        (0, 1, 2, 3),
        (0, 1, 0, 1),
        (0, 1, 2, 0, 1, 2, 0, 1, 2),
        (0, 1, 1, 0),
        (0, 1, 2, 3, 3, 2, 1, 0),
        (1, 0),
        (0, 1, 1, 0, 0),
        (0, 0, 1),
    )
]


@rotated(
    placement={str(placement.ranks): placement for placement in SHAPES},
    num_microbatches=[1, 2, 3, 5, 8],
)
def test_safe_schedule_runs_with_full_backwards_for_any_shape(
    placement: Placement, num_microbatches: int
) -> None:
    schedule = safe_schedule(placement, num_microbatches)
    schedule.verify()
    assert (placement, num_microbatches) == (schedule.placement, schedule.num_microbatches)
    assert {Forward, Backward} == {type(action) for order in schedule.orders for action in order}


def test_safe_schedule_of_one_stage_per_rank_is_1f1b() -> None:
    expected = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    assert expected == safe_schedule(Placement.linear(4), 8)


@pytest.mark.parametrize("placement", SHAPES, ids=lambda placement: str(placement.ranks))
def test_no_registered_schedule_holds_less_than_the_safe_one(placement: Placement) -> None:
    stages_per_rank = len(placement.stages_of(0))
    held = simulate(safe_schedule(placement, 8)).peak_memory
    for generator in schedules.REGISTRY:
        try:
            other = generator(
                num_ranks=placement.num_ranks, num_microbatches=8, stages_per_rank=stages_per_rank
            )
        except ScheduleError:
            continue
        has_backward = any(
            isinstance(part, Backward) for a in other.orders[0] for part in compute_parts(a)
        )
        if other.placement == placement and has_backward:
            assert held <= simulate(other).peak_memory + 1e-9


@pytest.mark.parametrize("placement", SHAPES, ids=lambda placement: str(placement.ranks))
def test_one_microbatch_at_a_time_holds_the_smallest_memory(placement: Placement) -> None:
    costs = CostTable.uniform(placement.num_stages, after_forward=3, after_input=2)
    caps = Problem.of(costs, placement, 3).smallest_caps
    schedule = one_at_a_time(placement, 3)
    schedule.verify(costs=costs, memory=caps)
    assert caps == tuple(rank.peak_memory for rank in simulate(schedule, costs).ranks)


def test_plan_is_faster_and_fits() -> None:
    costs = CostTable.uniform(4)
    safe = safe_schedule(Placement.linear(4), 8)
    found = choose_next(costs, safe, [4.0] * 4, seconds=5)
    assert found.is_new
    assert Outlook.of(safe, costs) == found.before
    assert found.after.step_s < found.before.step_s
    assert found.after.peak_memory <= 4


def test_plan_for_too_little_memory_for_the_safe_schedule_is_slower() -> None:
    costs = CostTable.uniform(4)
    safe = safe_schedule(Placement.linear(4), 8)
    found = choose_next(costs, safe, [1.0] * 4, seconds=5)
    assert found.is_new
    assert 1 == found.after.peak_memory
    assert found.before.step_s < found.after.step_s


def test_plan_keeps_the_schedule_if_none_is_faster() -> None:
    safe = safe_schedule(Placement.linear(1), 4)
    found = choose_next(CostTable.uniform(1, forward=0.5), safe, None, seconds=5)
    assert not found.is_new
    assert safe == found.schedule
    assert "kept the schedule: found none that is faster (1e+04 ms a step, bubble 0.0%" in str(
        found
    )


def test_full_backwards_are_kept_where_the_halves_are_no_gain() -> None:
    """The costs of a compiled stage: its input backward does all, and frees all."""
    costs = CostTable(
        forward=[1, 1],
        backward_input=[2, 2],
        backward_weight=[0, 0],
        backward=[2, 2],
        after_input=[0, 0],
    )
    found = choose_next(costs, safe_schedule(Placement.linear(2), 4), None, seconds=5)
    assert not found.is_new


def test_memory_in_which_one_microbatch_does_not_fit_is_rejected() -> None:
    safe = safe_schedule(Placement([0, 1, 1]), 4)
    message = "Nothing fits: rank 1 may hold 1.5, but one microbatch on its stages [1, 2] needs 2"
    with pytest.raises(ScheduleError, match=re.escape(message)):
        choose_next(CostTable.uniform(3), safe, [4.0, 1.5], seconds=5)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(12, "12 bytes"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (7e13, "7e+04 GB")],
)
def test_memory_is_told_in_a_unit_that_fits(num_bytes: float, expected: str) -> None:
    told = str(Outlook(step_s=0.25, bubble=0.125, peak_memory=num_bytes))
    assert f"250 ms a step, bubble 12.5%, memory {expected}" == told


def test_forwards_are_recomputed_if_the_costs_say_what_that_needs() -> None:
    safe = safe_schedule(Placement.linear(4), 8)
    measured = CostTable.uniform(4, after_forward=10.0, after_input=4.0, after_dropping=10.0)
    known = replace(measured, after_dropping=(1.0,) * 4)
    plain, found = (choose_next(costs, safe, [20.0] * 4, seconds=5) for costs in (measured, known))
    assert "R" not in plain.schedule.to_csv()
    assert "R" in found.schedule.to_csv()
    assert found.after.step_s < plain.after.step_s


STEPS = [[3.0, 0.5, 1.0, 0.25, 2.0, 1.0, 0.5, 4.0], [1.0, 0.25, 2.5, 0.5, 5.0, 1.0, 0.5, 2.0]]


def seen_in(placement: Placement) -> SeenWork:
    return SeenWork.of([[work[mb] for mb in order_by_work(work, placement)] for work in STEPS])


def test_schedule_for_microbatches_that_differ_is_faster_for_the_steps_seen() -> None:
    placement = Placement.v(4)
    costs, safe, seen = CostTable.uniform(8), safe_schedule(placement, 8), seen_in(placement)
    alike, found = (choose_next(costs, safe, None, 4, seen=work) for work in (UNKNOWN, seen))
    times = [
        sum(simulate(one.schedule, seen.apply(costs, work)).makespan for work in seen.steps)
        for one in (alike, found)
    ]
    assert times[1] < times[0]
    assert costs == found.costs  # Those of other steps have other scales.
    assert "for microbatches of 0.25 to 5 times the median work\n" in str(found)
    assert "median work" not in str(alike)


def test_microbatches_that_differ_keep_the_memory() -> None:
    placement = Placement.linear(4)
    safe = safe_schedule(placement, 8)
    found = choose_next(CostTable.uniform(4), safe, [4.0] * 4, 2, seen=seen_in(placement))
    found.schedule.verify(costs=CostTable.uniform(4), memory=[4.0] * 4)
    assert 0 <= found.gap < 1


@pytest.mark.parametrize("steps", [[], [(), ()], [[0.0, 0.0, 1.0]]])
def test_work_that_is_not_known_is_alike(steps: list[list[float]]) -> None:
    seen = SeenWork.of(steps)
    assert UNKNOWN == seen
    assert () == seen.mean
    assert CostTable.uniform(2) == seen.apply(CostTable.uniform(2), [1.0, 2.0])


def test_work_that_did_not_differ_is_known_when_it_grows() -> None:
    """A rank was said to be slow when all microbatches had become longer."""
    seen = SeenWork.of([[2.0, 2.0], [2.0, 2.0]])
    assert () == seen.mean == seen.differing
    assert CostTable.uniform(1) == seen.apply(CostTable.uniform(1), seen.mean)
    assert ((4.0, 4.0),) == seen.apply(CostTable.uniform(1), [8.0, 8.0]).time_scale


def test_microbatch_without_work_takes_a_little_time() -> None:
    seen = SeenWork.of([[0.0, 2.0, 4.0]])
    assert ((0.001, 1.0, 2.0),) == seen.apply(CostTable.uniform(1), [0.0, 2.0, 4.0]).time_scale
