"""No schedule is faster than the bound, and the bound is not far."""

from itertools import accumulate
from random import Random

import pytest
from problems import random_problem
from published_rows import V_ROW, problem_of_row

from fuzzing import IS_LONG
from penstock import CostTable, Placement, simulate
from penstock.solver import Problem, lower_bound, search
from penstock.solver.annealing import anneal
from penstock.solver.dispatch_policies import grid
from penstock.solver.dispatching import dispatch
from penstock.solver.evaluation import evaluate
from penstock.solver.exact import solve
from penstock.solver.registered_schedules import registered


def design_bound(problem: Problem) -> float:
    """DESIGN's bounds for one stage per rank, with prefix sums where stages differ.

    The last rank starts after p - 1 forwards and messages, and has work for all microbatches.
    By span, a rank runs k forwards before the first gradient comes back.
    """
    costs, m = problem.costs, problem.num_microbatches
    triples = zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    work = [m * sum(times) for times in triples]
    if problem.clock == "makespan":
        starts = (0.0, *accumulate(map(sum, zip(costs.forward, costs.delay, strict=False))))
        return max(start + each for start, each in zip(starts, work, strict=True))
    bounds = []
    for stage, each in enumerate(work):
        later = range(stage + 1, problem.num_stages)
        beyond = sum(costs.forward[s] + costs.backward_input[s] for s in later)
        beyond += 2 * sum(costs.delay[stage:])
        k = min(m, int(problem.caps[stage] * (1 + 1e-9) / costs.after_forward[stage]))
        bounds.append(each + max(0.0, beyond - (k - 1) * costs.forward[stage]))
    return max(bounds)


@pytest.mark.fuzz
def test_bound_is_no_less_than_that_of_the_design() -> None:
    for seed in range(2000 if IS_LONG else 50):
        problem = random_problem(seed, num_microbatches=(2, 12))
        if problem.num_stages == problem.num_ranks and problem.caps[0] < float("inf"):
            assert lower_bound(problem) >= design_bound(problem) * (1 - 1e-12), seed


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(2000 if IS_LONG else 24))
def test_no_schedule_that_is_found_beats_the_bound(seed: int) -> None:
    problem = random_problem(
        seed,
        num_ranks=(1, 5),
        num_microbatches=(1, 9),
        fuses=seed % 2 == 0,
        leaves_more=seed % 3 == 0,
        works=seed % 5 > 1,
    )
    least = lower_bound(problem) * (1 - 1e-9)
    for _, schedule in registered(problem.placement, problem.num_microbatches):
        report = simulate(schedule, problem.costs)
        if problem.find_excess(report) is None:
            assert problem.time_of(report) >= least
    policies = list(grid(problem))
    for policy in Random(seed).sample(policies, min(10, len(policies))):
        orders = dispatch(problem, policy)
        orders = anneal(problem, orders, num_moves=100, heat=5.0, seed=seed).orders
        assert evaluate(problem, orders).time >= least


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1001, 1600 if IS_LONG else 1013))
def test_the_best_schedule_does_not_beat_the_bound(seed: int) -> None:
    """Small enough for the exact solver to find the best there is, memory and all."""
    problem = random_problem(
        seed,
        num_ranks=(1, 3),
        num_microbatches=(1, 4),
        fuses=seed % 2 == 0,
        leaves_more=seed % 3 == 0,
        works=seed % 5 > 1,
    )
    found = solve(
        problem.costs,
        problem.placement,
        problem.num_microbatches,
        memory=problem.caps,
        clock=problem.clock,
        seconds=10 if IS_LONG else 2,
    )
    assert problem.time_of(found.report) >= lower_bound(problem) * (1 - 1e-9)


def test_overlapping_pairs_do_not_beat_the_bound() -> None:
    placement = Placement.v(4)
    for saving in (0.25, 0.5, 1.0):
        costs = CostTable.uniform(8, stages_per_rank=2, overlap_saving=saving)
        for clock in ("makespan", "span"):
            problem = Problem.of(costs, placement, 16, clock=clock)
            for _, schedule in registered(placement, 16):
                time = problem.time_of(simulate(schedule, costs))
                assert time >= lower_bound(problem) * (1 - 1e-9)


@pytest.mark.parametrize(("m", "w"), [(2, 0.5), (4, 0.25)])
def test_few_microbatches_take_their_way_there_and_back(m: int, w: float) -> None:
    """SCHEDULES: for m <= p, w < i, no messages, (m+p-1)(f+i)+w is the least makespan."""
    costs = CostTable.uniform(4, forward=1, backward_input=1, backward_weight=w)
    problem = Problem.of(costs, Placement.linear(4), m)
    assert (m + 3) * 2 + w == pytest.approx(lower_bound(problem))


def test_memory_for_one_microbatch_leaves_no_choice() -> None:
    """Each microbatch goes down and up, and has its W on rank 0, before the next may begin."""
    costs = CostTable.uniform(3, backward_weight=0.5, delay=0.25)
    problem = Problem.of(costs, Placement.linear(3), 4, memory=1)
    trip = 3 + 3 + 4 * 0.25
    assert lower_bound(problem) == pytest.approx(4 * trip + 4 * 0.5 - 1)


def test_bound_is_reached_where_ranks_of_two_stages_wait_for_messages() -> None:
    for seed, expected in ((65, 427), (119, 306), (128, 424)):
        problem = random_problem(seed, num_ranks=(2, 3), num_microbatches=(2, 5))
        assert expected == lower_bound(problem)
        found = search(
            problem.costs,
            problem.num_ranks,
            problem.num_microbatches,
            memory=problem.caps,
            placements=[problem.placement],
            clock=problem.clock,
            effort=0.1,
        )
        assert expected == found.time


@pytest.mark.parametrize(
    ("p", "m", "bubble"), [(8, 24, 0.0629), (16, 48, 0.0697), (32, 128, 0.0558)]
)
def test_bound_counts_the_memory_of_all_stages_of_a_rank(p: int, m: int, bubble: float) -> None:
    """For 16 ranks, the published schedule is proven to be the best."""
    row = {**V_ROW, "p": str(p), "m": str(m)}
    problem = problem_of_row(row, microbatches_held=p, halves=True)
    work = m * sum(float(row[name]) for name in ("t_f", "t_i", "t_w"))
    assert bubble == round(1 - work / lower_bound(problem), 4)


def test_full_backward_that_is_quicker_counts() -> None:
    costs = CostTable.uniform(1, backward=1.25)
    problem = Problem.of(costs, Placement.linear(1), 4)
    assert 4 * 2.25 == lower_bound(problem)
