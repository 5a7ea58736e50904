"""The search finds the best there is, or comes close: the exact solver says so.

Random problems of up to 4 ranks and 6 microbatches, with uneven stages and random caps.
"""

from statistics import median

import pytest
from problems import random_problem

from fuzzing import IS_LONG
from limits import HANG_S
from penstock.solver import Problem, search
from penstock.solver.exact import solve

COUNT = 200 if IS_LONG else 5
WORST_ALLOWED = 0.03


def gap_to_optimum(problem: Problem) -> float:
    """By which share the search is slower than the best schedule, or than what is proven of it."""
    found = search(
        problem.costs,
        problem.num_ranks,
        problem.num_microbatches,
        memory=problem.caps,
        placements=[problem.placement],
        clock=problem.clock,
    )
    if found.gap == 0:
        return 0.0
    best = solve(
        problem.costs,
        problem.placement,
        problem.num_microbatches,
        memory=problem.caps,
        clock=problem.clock,
        hint=found.schedule,
        seconds=HANG_S,
    )
    return found.time / best.lower_bound - 1


@pytest.mark.fuzz
def test_search_is_optimal_on_most_small_problems_and_close_on_all() -> None:
    gaps = {seed: gap_to_optimum(random_problem(seed)) for seed in range(COUNT)}
    assert median(gaps.values()) == pytest.approx(0.0, abs=1e-9)
    far = {seed: f"{gap:.2%}" for seed, gap in gaps.items() if gap > WORST_ALLOWED}
    assert {} == far
