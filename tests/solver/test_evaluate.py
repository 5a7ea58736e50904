"""Orders in codes take what the simulator says, and fit where it says so."""

from math import inf
from random import Random

import pytest
from problems import random_problem

from fuzzing import IS_LONG
from penstock import CostTable, Placement, simulate
from penstock.solver import Problem
from penstock.solver.dispatch_policies import grid
from penstock.solver.dispatching import dispatch
from penstock.solver.evaluation import critical_blocks, evaluate, fits, peak_memory
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Order

F, I, W, B = FORWARD, INPUT, WEIGHT, FULL  # noqa: E741 - as in the drawings of schedules
SEEDS = range(1000 if IS_LONG else 40)


def some_orders(problem: Problem, seed: int) -> list[Order]:
    policies = list(grid(problem))
    return dispatch(problem, Random(seed).choice(policies))


@pytest.mark.fuzz
def test_time_and_memory_are_those_of_the_simulator() -> None:
    for seed in SEEDS:
        problem = random_problem(
            seed, fuses=seed % 2 == 0, leaves_more=seed % 3 == 0, works=seed % 5 > 1
        )
        orders = some_orders(problem, seed)
        report = simulate(problem.schedule(orders), problem.costs)
        timing = evaluate(problem, orders)
        assert problem.time_of(report) == timing.time, seed
        ends = zip(report.ranks, problem.offsets, strict=True)
        assert [rank.last_end - offset for rank, offset in ends] == timing.lateness, seed
        expected = [rank.peak_memory for rank in report.ranks]
        assert expected == [peak_memory(problem, order) for order in orders], seed
        assert all(fits(problem, rank, order) for rank, order in enumerate(orders)), seed
        assert problem.find_excess(report) is None, seed


@pytest.mark.fuzz
def test_critical_blocks_and_messages_add_up_to_the_time() -> None:
    for seed in SEEDS:
        problem = random_problem(seed)
        orders = some_orders(problem, seed)
        timing = evaluate(problem, orders)
        blocks = critical_blocks(timing)
        busy = sum(
            problem.durations[code]
            for rank, first, last in blocks
            for code in orders[rank][first : last + 1]
        )
        delay = 0.0
        for rank, first, _ in blocks[:-1]:
            stage, kind = orders[rank][first] >> 2, orders[rank][first] & 3
            delay += problem.delays[stage - 1] if kind == F else problem.delays[stage]
        offset = problem.offsets[blocks[0][0]]
        assert timing.time == pytest.approx(busy + delay - offset), seed


def test_ranks_that_wait_for_each_other_never_end() -> None:
    problem = Problem.of(CostTable.uniform(2), Placement.linear(2), 2)
    first = [F, F, I, W, I, W]
    assert evaluate(problem, [first, [4 + F, 4 + I, 4 + W] * 2]).time < inf
    waits_for_second_backward = [F, I, W, F, I, W]
    assert (
        inf == evaluate(problem, [waits_for_second_backward, [4 + F, 4 + F, 4 + I, 4 + W] * 2]).time
    )


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([F, F, I, W, I, W], 6.0),
        ([F, I, F, W, I, W], 5.0),
        ([F, B, F, B], 3.0),
        ([I, F, W, F, I, W], inf),
        ([F, W, I, F, I, W], inf),
    ],
)
def test_memory_of_an_order_by_hand(order: Order, expected: float) -> None:
    costs = CostTable.uniform(1, after_forward=3.0, after_input=2.0)
    problem = Problem.of(costs, Placement.linear(1), 2)
    assert expected == peak_memory(problem, order)
    assert (expected < inf) == fits(problem, 0, order)
