"""Microbatches that differ: their sequence is searched too, and bounds hold for every order."""

from dataclasses import replace
from itertools import permutations
from random import Random
from statistics import median

import pytest
from problems import random_problem
from recomputing_problems import recomputing_problem

from fuzzing import IS_LONG
from penstock import CostTable, Placement, search, simulate
from penstock.errors import CostError
from penstock.ir import Action, BackwardInput, BackwardWeight
from penstock.solver import Problem, lower_bound
from penstock.solver.annealing import Walk, anneal
from penstock.solver.dispatch_policies import grid
from penstock.solver.dispatching import dispatch
from penstock.solver.evaluation import evaluate, fits, is_in_time, peak_memory
from penstock.solver.exact import solve
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.recomputing_dispatch import dispatch_with_drops
from penstock.solver.registered_schedules import registered
from penstock.solver.sequences import begin_with, with_sequence
from penstock.solver.uneven_moves import forwards_in_time, move_with_microbatch

WORST_ALLOWED = 0.02
ROUNDING = 1e-12  # Sums of float64 in another order than the simulator's.


def small_problem(seed: int) -> Problem:
    return random_problem(
        seed,
        num_ranks=(1, 3),
        num_microbatches=(1, 4),
        fuses=seed % 2 == 0,
        leaves_more=seed % 3 == 0,
        works=seed % 5 > 1,
        differs=True,
    )


def check_as_simulated(walk: Walk, caps: tuple[float, ...]) -> None:
    """Check the time and memory of orders, and that they fit in the caps."""
    problem = replace(walk.problem, caps=caps)
    report = simulate(problem.schedule(walk.orders), problem.costs)
    if not problem.has_queues:
        expected = pytest.approx(problem.time_of(report), rel=ROUNDING)
        assert expected == evaluate(problem, walk.orders).time
    assert problem.find_excess(report) is None
    for rank, order in enumerate(walk.orders):
        peak = pytest.approx(peak_memory(problem, order), rel=ROUNDING)
        assert report.ranks[rank].peak_memory == peak
        assert fits(problem, rank, order)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000 if IS_LONG else 24))
def test_orders_are_timed_and_fit_as_the_simulator_says(seed: int) -> None:
    """Policies never deadlock in the memory that they have, in any sequence."""
    problem = random_problem(seed, works=seed % 2 == 0, fuses=seed % 3 == 0, differs=True)
    places = list(range(problem.num_microbatches))
    random = Random(seed)
    policies = list(grid(problem))
    for policy in random.sample(policies, min(8, len(policies))):
        random.shuffle(places)
        arranged = problem.rearranged(places)
        walk = anneal(arranged, dispatch(arranged, policy), num_moves=60, heat=5.0, seed=seed)
        check_as_simulated(walk, problem.caps)


@pytest.mark.parametrize("seed", range(24))
def test_forwards_come_in_time_for_backwards_in_another_order(seed: int) -> None:
    """Such an order was dropped once, and the best one of four microbatches never reached."""
    problem = random_problem(seed, num_microbatches=(3, 6), differs=True)
    places = list(range(problem.num_microbatches))
    Random(seed).shuffle(places)
    field = "backwards" if seed % 2 else "forwards"
    turned = replace(problem, **{field: (tuple(places),) * problem.num_stages})
    for order in dispatch(problem, next(iter(grid(problem)))):
        moved = forwards_in_time(turned, order)
        assert is_in_time(turned.num_stages, moved, turned.places_of(moved))
        assert sorted(order) == sorted(moved)
        others = [[code for code in one if code & 3 != FORWARD] for one in (order, moved)]
        assert others[0] == others[1]
        assert moved == forwards_in_time(turned, moved)
        assert order == forwards_in_time(problem, order)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(300 if IS_LONG else 24))
def test_recomputed_orders_are_timed_and_fit_as_the_simulator_says(seed: int) -> None:
    """Walks may exceed the caps on the way, and stages get orders of their own; the end fits."""
    problem = recomputing_problem(seed, differs=True)
    orders = dispatch_with_drops(problem, next(iter(grid(problem))))
    walk = anneal(problem, orders, num_moves=250, heat=5.0, seed=seed, leeway=0.3)
    check_as_simulated(walk, problem.caps)


def orders_of_their_own(problem: Problem, random: Random) -> Problem:
    places = range(problem.num_microbatches)
    forwards, backwards, weights = (
        tuple(tuple(random.sample(places, len(places))) for _ in range(problem.num_stages))
        for _ in range(3)
    )
    return replace(problem, forwards=forwards, backwards=backwards, weights=weights)


@pytest.mark.fuzz
def test_stages_with_orders_of_their_own_take_what_the_simulator_says() -> None:
    """By span, a rank may begin with another microbatch than the first of the sequence."""
    for seed in range(500 if IS_LONG else 30):
        problem = orders_of_their_own(random_problem(seed, differs=True), Random(seed))
        orders = [
            [
                4 * stage + kind
                for kind, way in ((FORWARD, 1), (INPUT, -1), (WEIGHT, 1))
                for stage in stages[::way]
                for _ in range(problem.num_microbatches)
            ]
            for stages in problem.stages_of
        ]
        report = simulate(problem.schedule(orders), problem.costs)
        if not problem.has_queues:
            ends = [one.span if problem.clock == "span" else one.last_end for one in report.ranks]
            assert evaluate(problem, orders).lateness == pytest.approx(ends, rel=ROUNDING), seed
        for rank, order in enumerate(orders):
            peak = pytest.approx(peak_memory(problem, order), rel=ROUNDING)
            assert report.ranks[rank].peak_memory == peak, seed


def test_input_backward_before_its_own_forward_does_not_fit() -> None:
    """As many forwards as backwards had run before, but of another microbatch."""
    costs = CostTable.uniform(1, time_scale=[1, 2])
    problem = Problem.of(costs, Placement.linear(1), 2)
    order = [FORWARD, INPUT, WEIGHT, FORWARD, INPUT, WEIGHT]
    assert fits(problem, 0, order)
    assert fits(replace(problem, forwards=((1, 0),), backwards=((1, 0),)), 0, order)
    assert not fits(replace(problem, forwards=((1, 0),)), 0, order)
    assert not fits(replace(problem, backwards=((1, 0),)), 0, order)


def is_in_turn(named: list[Action]) -> bool:
    """Return whether each W is after the I of its microbatch."""
    done = {(one.stage, one.mb): n for n, one in enumerate(named) if isinstance(one, BackwardInput)}
    return all(
        done[one.stage, one.mb] < n
        for n, one in enumerate(named)
        if isinstance(one, BackwardWeight)
    )


@pytest.mark.fuzz
def test_action_moves_past_others_with_its_microbatch() -> None:
    """It moves as in a list of actions that name their microbatches; W may follow their I."""
    num_passed = 0
    for seed in range(300 if IS_LONG else 40):
        problem, random = random_problem(seed, fuses=seed % 2 == 0, differs=True), Random(seed)
        orders = dispatch(problem, random.choice(list(grid(problem))))
        for _ in range(20):
            rank = random.randrange(problem.num_ranks)
            index, target = (random.randrange(len(orders[rank])) for _ in range(2))
            named = list(problem.schedule(orders).orders[rank])
            named.insert(target, named.pop(index))
            changed, moved = move_with_microbatch(problem, orders[rank], index, target)
            if not fits(changed, rank, moved) or not is_in_turn(named):
                continue
            num_passed += changed.arrangement != problem.arrangement
            follow = orders[rank][index] & 3 in (INPUT, FULL)
            problem, orders[rank] = changed, moved
            found = problem.schedule(orders).orders[rank]
            pairs = zip(named, found, strict=True)
            differ = [one for one in pairs if one[0] != one[1]]
            assert all(follow and isinstance(one, BackwardWeight) for one, _ in differ), seed
    assert num_passed > 20


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(400 if IS_LONG else 16))
def test_the_best_schedule_in_any_order_does_not_beat_the_bound(seed: int) -> None:
    problem = small_problem(seed)
    costs, caps = problem.costs, problem.caps
    found = solve(
        costs,
        problem.placement,
        problem.num_microbatches,
        memory=caps,
        clock=problem.clock,
        seconds=10 if IS_LONG else 2,
    )
    assert problem.time_of(found.report) >= lower_bound(problem) * (1 - 1e-9)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000 if IS_LONG else 16))
def test_no_registered_schedule_beats_the_bound_in_any_sequence(seed: int) -> None:
    problem = random_problem(seed, num_microbatches=(2, 8), fuses=seed % 2 == 0, differs=True)
    least = lower_bound(problem) * (1 - 1e-9)
    for arranged in begin_with(problem):
        for _, schedule in registered(problem.placement, problem.num_microbatches):
            report = simulate(with_sequence(schedule, arranged.sequence), problem.costs)
            if problem.find_excess(report) is None:
                assert problem.time_of(report) >= least


def gap_to_exact(problem: Problem) -> float:
    """By which share the search is slower than the exact solver, which has 10 seconds."""
    m, caps, clock = problem.num_microbatches, problem.caps, problem.clock
    where = [problem.placement]
    found = search(problem.costs, problem.num_ranks, m, memory=caps, placements=where, clock=clock)
    best = solve(
        problem.costs,
        problem.placement,
        m,
        memory=caps,
        clock=clock,
        hint=found.schedule,
        seconds=10,
    )
    assert lower_bound(problem) <= problem.time_of(best.report) * (1 + 1e-9)
    return found.time / problem.time_of(best.report) - 1


@pytest.mark.fuzz
def test_search_is_optimal_on_most_small_problems_and_close_on_all() -> None:
    problems = {
        seed: random_problem(seed, num_ranks=(2, 4 if IS_LONG else 3), differs=True)
        for seed in range(100, 300 if IS_LONG else 103)
    }
    gaps = {seed: gap_to_exact(problem) for seed, problem in problems.items()}
    assert median(gaps.values()) == pytest.approx(0.0, abs=1e-9)
    far = {seed: f"{gap:.2%}" for seed, gap in gaps.items() if gap > WORST_ALLOWED}
    assert {} == far


def test_ranks_may_begin_with_different_microbatches() -> None:
    """The best that the exact solver proves, 892 by span, needs it; 919 was found without."""
    problem = random_problem(245, differs=True)
    found = search(
        problem.costs,
        problem.num_ranks,
        problem.num_microbatches,
        memory=problem.caps,
        placements=[problem.placement],
        clock=problem.clock,
        effort=0.5,
    )
    assert 892 <= found.time <= 892 * (1 + WORST_ALLOWED)
    begins = [order[0].mb for order in found.schedule.orders]  # type: ignore[union-attr]
    assert len({*begins}) > 1


def test_search_chooses_which_microbatch_goes_first() -> None:
    """On two ranks, the smallest first lets rank 1 begin soonest."""
    costs = CostTable.uniform(2, time_scale=[4, 1])
    found = search(costs, 2, 2, effort=0.1)
    times = {
        order: min(
            simulate(with_sequence(schedule, order), costs).makespan
            for _, schedule in registered(Placement.linear(2), 2)
        )
        for order in permutations(range(2))
    }
    assert times[1, 0] < times[0, 1]
    assert found.time <= times[1, 0]
    assert 1 == found.schedule.orders[0][0].mb  # type: ignore[union-attr]


def test_scales_of_one_change_nothing() -> None:
    even = random_problem(3)
    ones = (1.0,) * even.num_microbatches
    costs = replace(even.costs, time_scale=(ones,) * even.num_stages, memory_scale=ones)
    for problem in (even, replace_costs(even, costs)):
        policy = next(iter(grid(problem)))
        orders = dispatch(problem, policy)
        report = simulate(problem.schedule(orders), costs)
        assert evaluate(problem, orders).time == pytest.approx(problem.time_of(report))
    assert dispatch(even, policy) == dispatch(replace_costs(even, costs), policy)


def replace_costs(problem: Problem, costs: CostTable) -> Problem:
    return Problem.of(
        costs,
        problem.placement,
        problem.num_microbatches,
        memory=problem.caps,
        clock=problem.clock,
    )


def test_exact_solver_finds_the_best_of_all_orders() -> None:
    """Brute force over the sequence, for one rank after another: nothing is missed."""
    costs = CostTable.uniform(2, backward_weight=0.5, time_scale=[3, 1, 2])
    best = solve(costs, Placement.linear(2), 3)
    problem = Problem.of(costs, Placement.linear(2), 3)
    times = []
    for places in permutations(range(3)):
        arranged = problem.rearranged(places)
        for policy in grid(arranged):
            times.append(evaluate(arranged, dispatch(arranged, policy)).time)
    assert best.is_optimal
    assert best.report.makespan <= min(times)
    assert lower_bound(problem) <= best.report.makespan


def test_problem_needs_scales_for_each_microbatch() -> None:
    costs = CostTable.uniform(2, time_scale=[1, 2])
    with pytest.raises(CostError, match="The costs are for 2 microbatches of different sizes, but"):
        Problem.of(costs, Placement.linear(2), 3)


def test_smallest_cap_is_that_of_the_largest_microbatch() -> None:
    costs = CostTable.uniform(2, memory_scale=[1, 3, 2])
    assert (3.0, 3.0) == Problem.of(costs, Placement.linear(2), 3).smallest_caps
    found = search(costs, 2, 3, memory=3, effort=0.1)
    assert 3 == found.report.peak_memory


def test_rows_of_what_was_tried_are_the_best_over_all_sequences() -> None:
    """Each sequence had rows of its own, so the same name stood there six times and more."""
    costs = CostTable.uniform(2).for_lengths([2048, 512, 1024], measured_length=1024)
    found = search(costs, 2, 3, memory=3.5, effort=0.02)
    names = [(tried.name, tried.placement) for tried in found.tried]
    assert len(names) == len({*names})
    [row] = [tried for tried in found.tried if tried.name == "1F1B"]
    [(_, schedule)] = [one for one in registered(Placement.linear(2), 3) if one[0] == "1F1B"]
    problem = Problem.of(costs, Placement.linear(2), 3, memory=3.5)
    reports = [
        simulate(with_sequence(schedule, arranged.sequence), costs)
        for arranged in begin_with(problem)
    ]
    assert len(reports) == row.count > 1
    assert row.fits
    fitting = [one.makespan for one in reports if problem.find_excess(one) is None]
    assert 0 < len(fitting)
    assert min(fitting) == row.time
