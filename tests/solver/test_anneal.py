"""Moves on the critical path make orders better, and never break them."""

import time

import pytest
from problems import random_problem

from fuzzing import IS_LONG
from penstock import CostTable, Placement
from penstock.solver import Problem
from penstock.solver.annealing import anneal
from penstock.solver.dispatch_policies import grid
from penstock.solver.dispatching import dispatch
from penstock.solver.evaluation import evaluate
from penstock.solver.named_codes import FULL
from penstock.solver.problem import Order


def first_orders(problem: Problem) -> list[Order]:
    return dispatch(problem, next(iter(grid(problem))))


@pytest.mark.fuzz
def test_orders_get_no_worse_and_can_still_be_run() -> None:
    for seed in range(500 if IS_LONG else 20):
        problem = random_problem(seed, fuses=seed % 2 == 0, works=seed % 3 == 0)
        before = first_orders(problem)
        after = anneal(problem, before, num_moves=300, heat=5.0, seed=seed).orders
        assert evaluate(problem, after).time <= evaluate(problem, before).time, seed
        problem.schedule(after).verify(costs=problem.costs, memory=problem.caps)


def test_same_seed_finds_the_same_orders() -> None:
    problem = random_problem(5)
    found = [
        anneal(problem, first_orders(problem), num_moves=500, heat=5.0, seed=seed).orders
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]


def test_most_problems_get_better() -> None:
    problems = [random_problem(seed, num_ranks=(3, 4)) for seed in range(30)]
    better = 0
    for problem in problems:
        before = first_orders(problem)
        after = anneal(problem, before, num_moves=500, heat=5.0, seed=0).orders
        better += evaluate(problem, after).time < evaluate(problem, before).time
    assert better > 15


def test_walk_ends_at_its_goal_and_at_its_deadline() -> None:
    problem = random_problem(5)
    before = first_orders(problem)
    goal = evaluate(problem, before).time
    at_goal = anneal(problem, before, num_moves=10**9, heat=1.0, seed=0, goal=goal)
    assert (before, 0, True, problem) == at_goal
    past = time.monotonic() - 1
    too_late = anneal(problem, before, num_moves=10**9, heat=1.0, seed=0, deadline=past)
    assert (before, 0, False, problem) == too_late


def test_full_backward_is_cut_where_others_wait_and_used_where_none_does() -> None:
    """Stage 0 has nobody to send to: B saves time. Stage 1's gradient is waited for."""
    costs = CostTable(
        forward=[1, 1],
        backward_input=[1, 1],
        backward_weight=[1, 3],
        backward=[1.5, 3.9],
    )
    problem = Problem.of(costs, Placement.linear(2), 1)
    fused = [[0, 3], [4, 7]]
    found = anneal(problem, fused, num_moves=100, heat=0.1, seed=0).orders
    assert [[0, FULL], [4, 5, 6]] == found
