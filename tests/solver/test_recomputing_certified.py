"""Searches with recomputation against the exact solver, on small problems short of memory."""

import re
from dataclasses import replace
from statistics import median

import pytest
from recomputing_problems import recomputing_problem

from fuzzing import IS_LONG
from limits import HANG_S
from penstock import CostTable, Placement, search, simulate
from penstock.errors import ScheduleError
from penstock.ir import Recompute
from penstock.passes import add_recompute
from penstock.schedules import get
from penstock.solver import lower_bound
from penstock.solver.exact import solve
from penstock.solver.recomputing_bounds import trade_off
from penstock.solver.window_bounds import window_bound

COUNT = 100 if IS_LONG else 1
WORST_ALLOWED = 0.02


def gap_to_optimum(seed: int) -> float:
    """By which share the search is slower than what the exact solver finds, mostly with proof."""
    problem = recomputing_problem(seed, works=seed % 5 == 4)
    shared = {"memory": problem.caps, "clock": problem.clock, "recompute": True}
    found = search(
        problem.costs,
        problem.num_ranks,
        problem.num_microbatches,
        placements=[problem.placement],
        seconds=HANG_S,
        **shared,
    )
    best = solve(
        problem.costs,
        problem.placement,
        problem.num_microbatches,
        hint=found.schedule,
        seconds=HANG_S,
        **shared,
    )
    assert found.lower_bound <= problem.time_of(best.report) * (1 + 1e-9)
    return found.time / problem.time_of(best.report) - 1


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(400 if IS_LONG else 5))
def test_the_best_schedule_in_any_order_does_not_beat_the_bounds(seed: int) -> None:
    problem = recomputing_problem(seed, works=seed % 5 == 4, differs=seed % 2 == 0)
    best = solve(
        problem.costs,
        problem.placement,
        problem.num_microbatches,
        memory=problem.caps,
        clock=problem.clock,
        seconds=10 if IS_LONG else 2,
        recompute=True,
    )
    took = problem.time_of(best.report) * (1 + 1e-9)
    for bound in (window_bound, trade_off, lower_bound):
        assert bound(problem) <= took
    assert best.lower_bound <= took


@pytest.mark.fuzz
def test_search_is_optimal_on_most_small_problems_and_close_on_all() -> None:
    gaps = {seed: gap_to_optimum(seed) for seed in range(COUNT)}
    assert median(gaps.values()) == pytest.approx(0.0, abs=1e-9)
    far = {seed: f"{gap:.2%}" for seed, gap in gaps.items() if gap > WORST_ALLOWED}
    assert {} == far


COSTS = CostTable.uniform(
    2, backward_weight=0.0, after_forward=10.0, after_input=0.0, after_dropping=1.0
)


def test_exact_solver_recomputes_where_that_is_best() -> None:
    shape = COSTS, Placement.linear(2), 6
    best = solve(*shape, memory=12, recompute=True)
    assert (16, True) == (best.report.makespan, best.is_optimal)
    assert 12 >= best.report.peak_memory
    assert any(isinstance(action, Recompute) for order in best.schedule.orders for action in order)
    assert 24 == solve(*shape, memory=12).report.makespan  # One at a time on rank 0.
    assert 14 == solve(*shape, memory=20, recompute="auto").report.makespan


def test_exact_solver_recomputes_microbatches_that_differ() -> None:
    """Rank 0 runs F0 until 1, F1 until 4, B0 until 5, R1 in 2 * 3 until 11, and then B1."""
    costs = CostTable.uniform(
        2, backward_weight=0.0, after_forward=10.0, after_dropping=1.0, recompute=2.0
    )
    shape = replace(costs, time_scale=((1.0, 3.0),) * 2), Placement.linear(2), 2
    times = [
        solve(*shape, memory=cap, recompute=again).report.makespan
        for cap, again in ((20, True), (11, True), (11, False))
    ]
    assert [13, 14, 16] == times


def test_exact_solver_starts_from_a_hint_that_recomputes() -> None:
    hint = add_recompute(get("1F1B")(num_ranks=2, num_microbatches=3))
    best = solve(COSTS, Placement.linear(2), 3, memory=12, hint=hint, recompute=True)
    assert best.report.makespan < simulate(hint, COSTS).makespan
    message = "hint recomputes forwards, but recompute is False. Set it to True, or give"
    with pytest.raises(ScheduleError, match=re.escape(message)):
        solve(COSTS, Placement.linear(2), 3, hint=hint)
