"""Searches that may recompute forwards: for which microbatches, when, and how good that is."""

import re
from dataclasses import replace
from math import inf
from random import Random

import pytest
from recomputing_problems import recomputing_problem

from fuzzing import IS_LONG
from penstock import CostTable, Placement, search, simulate
from penstock.errors import ScheduleError
from penstock.ir import Recompute, Schedule, Unshard
from penstock.passes import add_recompute
from penstock.passes.held_memory import ROUNDING
from penstock.solver import Problem, SearchResult, lower_bound
from penstock.solver.annealing import anneal
from penstock.solver.dispatch_policies import grid, vary
from penstock.solver.evaluation import evaluate, fits, peak_memory
from penstock.solver.named_codes import FORWARD, FULL, INPUT
from penstock.solver.problem import Order, codes
from penstock.solver.recomputed_orders import drop_all, drop_to_fit
from penstock.solver.recomputing_bounds import trade_off, without_recomputing
from penstock.solver.recomputing_dispatch import dispatch_with_drops
from penstock.solver.registered_schedules import registered
from penstock.solver.sequences import begin_with, with_sequence

COUNT = 200 if IS_LONG else 12

# A rank of four can hold two microbatches, where 1F1B holds four.
SHORT = CostTable.uniform(4, after_forward=10.0, after_input=4.0, after_dropping=1.0, recompute=1.0)


def ask(problem: Problem, effort: float = 0.1) -> SearchResult:
    return search(
        problem.costs,
        problem.num_ranks,
        problem.num_microbatches,
        memory=problem.caps,
        placements=[problem.placement],
        clock=problem.clock,
        effort=effort,
        recompute=True,
    )


def recomputed(schedule: Schedule) -> int:
    return sum(isinstance(action, Recompute) for order in schedule.orders for action in order)


def check(problem: Problem, orders: list[Order]) -> None:
    """The time and memory of codes are those of the schedule, and the schedule fits."""
    report = simulate(problem.schedule(orders), problem.costs)
    assert problem.find_excess(report) is None
    if not problem.has_queues:
        assert problem.time_of(report) == pytest.approx(evaluate(problem, orders).time)
    for rank, order in enumerate(orders):
        assert fits(problem, rank, order)
        assert report.ranks[rank].peak_memory == pytest.approx(peak_memory(problem, order))


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(COUNT))
def test_policies_and_moves_give_orders_that_run_and_fit(seed: int) -> None:
    problem = recomputing_problem(seed, works=seed % 2 == 0, differs=seed % 3 > 0)
    random = Random(seed)
    policies = random.sample(list(grid(problem)), 10)
    policies += [vary(random, problem, policy) for policy in policies]
    places = list(range(problem.num_microbatches))
    for policy in policies:
        if problem.sequence:
            random.shuffle(places)
            problem = problem.rearranged(places)
        orders = dispatch_with_drops(problem, policy)
        check(problem, orders)
    start = evaluate(problem, orders).time
    for leeway in (0.0, 0.3):
        walk = anneal(problem, orders, num_moves=200, heat=start / 20, seed=seed, leeway=leeway)
        check(walk.problem, walk.orders)
        assert evaluate(walk.problem, walk.orders).time <= start


def test_walk_with_leeway_ends_within_the_caps() -> None:
    """Orders that exceed them are faster, and must not be what the walk returns."""
    problem = Problem.of(SHORT, Placement.linear(4), 6, memory=20.0, recompute=True)
    one_at_a_time = replace(next(iter(grid(problem))), ahead=(1,) * 4)
    orders = dispatch_with_drops(problem, one_at_a_time)
    for seed in range(4):
        walk = anneal(problem, orders, num_moves=300, heat=1e6, seed=seed, leeway=1.0)
        check(walk.problem, walk.orders)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(COUNT // 2))
def test_result_fits_and_nothing_that_was_tried_is_faster(seed: int) -> None:
    problem = recomputing_problem(seed, works=seed % 2 == 0, differs=seed % 3 > 0)
    found = ask(problem, effort=0.02)
    found.schedule.verify(costs=problem.costs, memory=problem.caps)
    assert found.report.peak_memory <= max(problem.caps) * ROUNDING
    assert found.lower_bound <= found.time * (1 + 1e-9)
    for tried in found.tried:
        assert not tried.fits or found.time <= tried.time * (1 + 1e-9)
    for _, schedule in registered(problem.placement, problem.num_microbatches):
        for arranged in begin_with(problem):
            in_sequence = with_sequence(schedule, arranged.sequence)
            for one in (in_sequence, add_recompute(in_sequence)):
                report = simulate(one, problem.costs)
                if problem.find_excess(report) is None:
                    assert found.time <= problem.time_of(report) * (1 + 1e-9)


def test_recomputation_saves_time_where_memory_is_short() -> None:
    question = {"num_ranks": 4, "num_microbatches": 8, "memory": 20.0, "effort": 0.1}
    plain, found = search(SHORT, **question), search(SHORT, **question, recompute=True)
    assert 0 == recomputed(plain.schedule) < recomputed(found.schedule) < 4 * 8
    assert found.time < 0.9 * plain.time
    assert found.recompute
    assert not plain.recompute
    assert {"1F1B", "1F1B, recomputed", "1F1B, partly recomputed"} <= {t.name for t in found.tried}


@pytest.mark.parametrize(("memory", "effort"), [(109, 0.05), (100, 0.02), (90, 0.02)])
def test_what_is_found_without_recomputation_is_found_with_it_too(
    memory: float, effort: float
) -> None:
    """Walks that may recompute took other ways: in a memory of 109 to 909.75, not to 869.75."""
    sizes = [2, 1, 4, 2.5, 0.25]
    costs = CostTable(
        forward=[15, 6, 1, 11],
        backward_input=[10, 17, 17, 22],
        backward_weight=[14, 12, 20, 27],
        backward=[21, 23, 37, 44],
        after_forward=[11, 10, 3, 6],
        after_input=[5, 0, 1, 3],
        time_scale=sizes,
        memory_scale=sizes,
    )
    loop = Placement.loop(2, stages_per_rank=2)
    question = {"memory": memory, "effort": effort, "placements": [loop]}
    plain = search(costs, 2, 5, **question)
    assert search(costs, 2, 5, **question, recompute=True).time <= plain.time


def test_recomputation_that_gains_nothing_is_left_out() -> None:
    roomy = search(SHORT, 4, 8, memory=1000.0, recompute=True, effort=0.1)
    assert 0 == recomputed(roomy.schedule)
    assert roomy.gap == 0
    unlimited = search(SHORT, 4, 8, recompute=True, effort=0.1)
    assert unlimited.tried == search(SHORT, 4, 8, effort=0.1).tried


def test_what_does_not_fit_may_fit_with_recomputation() -> None:
    costs = CostTable.uniform(4, after_forward=20.0, after_dropping=2.0)
    with pytest.raises(
        ScheduleError,
        match=re.escape(
            "rank 0 may hold 39, but one microbatch on its stages [0, 3] needs 40. The smallest "
            "memory that fits is 40 on each rank: allow that, use smaller microbatches, or cut the "
            "model into more stages. If forwards may be recomputed, 22 is enough."
        ),
    ):
        search(costs, 2, 3, memory=39.0, placements=[Placement.v(2)])
    found = search(
        costs, 2, 3, memory=22.0, placements=[Placement.v(2)], recompute=True, effort=0.02
    )
    assert 22 == found.report.peak_memory
    with pytest.raises(ScheduleError, match=r"needs 22\. The smallest memory that fits is 22 on"):
        search(costs, 2, 3, memory=21.0, placements=[Placement.v(2)], recompute=True)


def test_auto_recomputes_if_the_costs_say_what_that_needs() -> None:
    unknown = replace(SHORT, after_dropping=(0.0,) * 4)
    question = {"num_ranks": 4, "num_microbatches": 6, "memory": 20.0, "effort": 0.02}
    assert search(SHORT, **question, recompute="auto").recompute
    assert not search(unknown, **question, recompute="auto").recompute
    assert search(unknown, **question, recompute=True).recompute
    with pytest.raises(ScheduleError, match=r"recompute is 'always'\. Expected True, False or"):
        search(SHORT, **question, recompute="always")


def test_recomputation_saves_time_for_microbatches_that_differ() -> None:
    """The time of R and what is dropped scale like the forward and what it keeps."""
    costs = SHORT.for_lengths([3072, 1024, 2048, 1024, 2048, 1024], measured_length=2048)
    question = {"num_ranks": 4, "num_microbatches": 6, "memory": 24.0, "effort": 0.1}
    plain, found = search(costs, **question), search(costs, **question, recompute="auto")
    assert 0 == recomputed(plain.schedule) < recomputed(found.schedule) < 4 * 6
    assert found.time < 0.95 * plain.time
    assert found.lower_bound <= found.time
    found.schedule.verify(costs=costs, memory=24.0)


def test_sharded_stages_are_recomputed_too() -> None:
    costs = replace(SHORT, gather=(0.1,) * 4, gathered=(3.0,) * 4)
    question = {"num_ranks": 4, "num_microbatches": 4, "memory": 23.0, "effort": 0.02}
    found = search(costs, **question, gathers="auto", recompute=True)
    kinds = {type(action) for order in found.schedule.orders for action in order}
    assert {Unshard, Recompute} <= kinds
    assert found.time < search(costs, **question, gathers="auto").time
    found.schedule.verify(costs=costs, memory=23.0)


def test_advice_tells_what_recomputation_would_save() -> None:
    found = search(SHORT, 4, 6, memory=20.0, effort=0.02)
    assert any("forwards that are recomputed" == help.what for help in found.advise().helps)
    found = search(SHORT, 4, 6, memory=20.0, effort=0.02, recompute=True)
    assert all("forwards that are recomputed" != help.what for help in found.advise().helps)


def test_what_is_dropped_has_the_last_backward() -> None:
    problem = Problem.of(SHORT, Placement.linear(4), 3, memory=21.0, recompute=True)
    order = [FORWARD, FORWARD, FORWARD, FULL, FULL, FULL]
    dropped = drop_to_fit(problem, 0, order)
    again = problem.recomputation(0, 2)
    assert [FORWARD, FORWARD, FORWARD, FULL, FULL, again, FULL] == dropped
    assert (0, 2) == problem.recomputed(again)
    assert 21.0 == peak_memory(problem, dropped)
    tight = replace(problem, caps=(9.0,) * 4)
    assert drop_to_fit(tight, 0, order) is None


def test_rank_whose_microbatches_hold_nothing_may_have_a_cap_of_zero() -> None:
    """It was divided by the cap to see by how much orders exceed it."""
    costs = CostTable(
        forward=[1, 1],
        backward_input=[1, 1],
        backward_weight=[1, 1],
        after_forward=[10, 0],
        after_input=[4, 0],
        after_dropping=[1, 0],
    )
    found = search(costs, 2, 6, memory=[12, 0], recompute=True, effort=0.1)
    most, none = (rank.peak_memory for rank in found.report.ranks)
    assert 0 == none < most <= 12


def test_order_with_a_recomputation_out_of_place_does_not_fit() -> None:
    problem = Problem.of(SHORT, Placement.linear(4), 1, recompute=True)
    again = problem.recomputation(0, 0)
    assert 10.0 == peak_memory(problem, [FORWARD, again, FULL])
    for order in ([again, FORWARD, FULL], [FORWARD, FULL, again], [FORWARD, INPUT, again, 2]):
        assert peak_memory(problem, order) == inf


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_codes_with_all_recomputed_are_the_schedule_with_all_recomputed(name: str) -> None:
    problem = Problem.of(SHORT, Placement.linear(4), 5, recompute=True)
    schedule = dict(registered(problem.placement, 5))[name]
    orders = [drop_all(problem, order) for order in codes(schedule)]
    assert add_recompute(schedule) == problem.schedule(orders)


def test_bound_weighs_recomputations_against_waits() -> None:
    """Three microbatches fill the round trip, and one can be kept: others are recomputed or wait.

    The exact solver finds 16 too: two rounds of three, with four recomputations.
    """
    costs = CostTable.uniform(
        2, backward_weight=0.0, after_forward=10.0, after_input=0.0, after_dropping=1.0
    )
    problem = Problem.of(costs, Placement.linear(2), 6, memory=12.0, recompute=True)
    assert 14 == lower_bound(without_recomputing(problem))
    assert 15 == trade_off(problem) == lower_bound(problem)
    assert 16 == ask(problem).time


def test_forward_that_only_needs_less_while_it_runs_is_dropped() -> None:
    """It holds as much afterwards, so it was kept, and the orders had no end."""
    costs = CostTable.uniform(
        1,
        after_forward=1,
        after_dropping=1,
        during_forward=3,
        during_dropping=0,
        during_recompute=0,
    )
    found = search(costs, 1, 2, memory=2, recompute=True, effort=0.02)
    assert 8 == found.time
    assert 2 == recomputed(found.schedule)


def test_bound_of_a_rank_that_cannot_run_any_forward_is_infinite() -> None:
    """What F needs is more than the cap: the number of microbatches in it was negative."""
    costs = CostTable.uniform(2, after_dropping=0.5, during_forward=10)
    problem = Problem.of(costs, Placement.linear(2), 4, memory=2, recompute=True)
    assert problem.find_shortage() == 0
    lower_bound(problem)
