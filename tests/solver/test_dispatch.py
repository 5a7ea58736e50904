"""Ranks that choose for themselves always come to an end, and within their memory."""

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from problems import random_problem

from fuzzing import IS_LONG
from penstock import CostTable, Placement, simulate
from penstock.solver import Problem
from penstock.solver.dispatch_policies import grid, vary
from penstock.solver.dispatching import Policy, dispatch
from penstock.solver.named_codes import FULL


def policy(problem: Problem, **changes: Any) -> Policy:
    """Backwards first, then forwards as far as memory goes, then weights, unless changed."""
    base = next(iter(grid(problem)))
    ahead = (problem.num_microbatches,) * problem.num_stages
    return replace(base, **{"ahead": ahead, **changes})


@pytest.mark.fuzz
def test_orders_of_every_policy_can_be_run() -> None:
    for seed in range(400 if IS_LONG else 24):
        problem = random_problem(
            seed, fuses=seed % 2 == 0, leaves_more=seed % 4 < 2, works=seed % 3 > 0
        )
        for number, chosen in enumerate(grid(problem)):
            if number % 5 == seed % 5:
                schedule = problem.schedule(dispatch(problem, chosen))
                schedule.verify(costs=problem.costs, memory=problem.caps)


@pytest.mark.parametrize(
    ("placement", "extras"),
    [
        (Placement.linear(3), (0, 1, 3)),
        (Placement.v(3), (0, 1, 3)),
        (Placement.loop(3, stages_per_rank=2), (0, 1)),
        (Placement.v(3, stages_per_rank=3), (1,)),
    ],
    ids=["linear", "V", "loop", "V, 3 per rank"],
)
def test_least_memory_is_enough(placement: Placement, extras: tuple[int, ...]) -> None:
    """Each rank may hold one microbatch on its stages, and a little: never all that it wants."""
    num_stages = placement.num_stages
    costs = CostTable.uniform(num_stages, after_forward=2, after_input=1)
    for extra in extras:
        problem = Problem.of(costs, placement, 5, memory=2 * num_stages // 3 + extra)
        for chosen in grid(problem):
            schedule = problem.schedule(dispatch(problem, chosen))
            schedule.verify(costs=costs, memory=problem.caps)


def test_forwards_ahead_are_limited_by_stage() -> None:
    problem = Problem.of(CostTable.uniform(3), Placement.linear(3), 6)
    report = simulate(
        problem.schedule(dispatch(problem, policy(problem, ahead=(3, 2, 1)))), problem.costs
    )
    assert [3, 2, 1] == [
        max(
            sum(1 if "F" in str(action) else -1 for action in order[:end] if "W" not in str(action))
            for end in range(len(order) + 1)
        )
        for order in report.timeline.schedule.orders
    ]


def test_patient_rank_waits_for_what_is_on_its_way() -> None:
    """Rank 0 has no room for a third forward; the next gradient comes before W would end."""
    costs = CostTable(forward=[1, 1], backward_input=[1, 1], backward_weight=[4, 1], delay=2)
    problem = Problem.of(costs, Placement.linear(2), 3, memory=2)

    def first_order(patience: float) -> str:
        orders = dispatch(problem, policy(problem, patience=(patience,) * 2))
        return problem.schedule(orders).to_csv().splitlines()[0]

    assert "0F0,0F1,0I0,0W0,0I1,0F2,0W1,0I2,0W2" == first_order(1.0)
    assert "0F0,0F1,0I0,0I1,0W0,0F2,0W1,0I2,0W2" == first_order(0.0)


def test_variations_change_one_thing_and_stay_within_limits() -> None:
    problem = random_problem(1, num_ranks=(4, 4))
    generator, current = Random(0), next(iter(grid(problem)))
    kinds = set()
    for _ in range(300):
        changed = vary(generator, problem, current)
        differing = [n for n in Policy.__slots__ if getattr(changed, n) != getattr(current, n)]
        assert len(differing) <= 1
        kinds.update(differing)
        assert all(1 <= depth <= problem.num_microbatches for depth in changed.ahead)
        current = changed
    assert {"preference", "ahead", "patience", "keeps_room"} == kinds


def test_grid_has_full_backwards_only_where_they_are_quicker() -> None:
    def has_full(problem: Problem) -> bool:
        return any(code & 3 == FULL for chosen in grid(problem) for code in chosen.preference[0])

    assert has_full(random_problem(0, fuses=True))
    assert not has_full(random_problem(0))


def test_problem_without_work_is_no_problem() -> None:
    costs = CostTable.uniform(2, forward=0, backward_input=0, backward_weight=0)
    problem = Problem.of(costs, Placement.linear(2), 2, memory=inf)
    for chosen in grid(problem):
        problem.schedule(dispatch(problem, chosen)).verify()
