"""Schedules that run before costs are known; tests/runtime/test_next_schedule.py has more."""

import pytest

from penstock import Placement, simulate
from penstock.ir import Backward, Forward
from penstock.solver.safe_schedules import one_at_a_time, safe_schedule


@pytest.mark.parametrize("placement", [Placement.v(4), Placement.loop(4, stages_per_rank=2)])
def test_safe_schedule_is_faster_than_one_microbatch_at_a_time(placement: Placement) -> None:
    safe, least = safe_schedule(placement, 8), one_at_a_time(placement, 8)
    assert simulate(safe).makespan < simulate(least).makespan


@pytest.mark.parametrize(
    "placement",
    [Placement.linear(4), Placement.v(4), Placement.loop(4, stages_per_rank=2)],
    ids=["linear", "V", "loop"],
)
def test_safe_schedule_has_full_backwards_alone(placement: Placement) -> None:
    actions = {type(action) for order in safe_schedule(placement, 8).orders for action in order}
    assert {Forward, Backward} == actions
