"""New endings: the same actions, forwards as before, and no time lost where that is possible."""

import pytest
from problems import random_problem
from published_rows import V_ROW, problem_of_row

from fuzzing import IS_LONG
from penstock import CostTable, Placement, schedules
from penstock.solver import Problem, lower_bound
from penstock.solver.bounds import latest_inputs
from penstock.solver.dispatch_policies import grid
from penstock.solver.dispatching import dispatch
from penstock.solver.endings import finish
from penstock.solver.evaluation import evaluate
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Order, codes


def zb_v(problem: Problem) -> list[Order]:
    p, m = problem.num_ranks, problem.num_microbatches
    return codes(schedules.get("zb-v")(num_ranks=p, num_microbatches=m))


def finished(problem: Problem, orders: list[Order]) -> list[Order]:
    latest = latest_inputs(problem, lower_bound(problem) * (1 + 1e-9))
    made = finish(problem, orders, latest)
    assert made is not None
    return made


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (16, 48), (24, 48)])
@pytest.mark.parametrize(
    ("t_f", "t_i", "t_w", "t_comm"),
    [
        (28.814, 28.760, 19.352, 1.610),
        (28.814, 28.760, 19.352, 0.5),
        (18.522, 18.086, 9.337, 0.601),
        (33, 29.4, 22, 2.5),
    ],
)
def test_zb_v_with_a_new_ending_is_proven_to_be_the_best(
    p: int, m: int, t_f: float, t_i: float, t_w: float, t_comm: float
) -> None:
    times = {"t_f": t_f, "t_i": t_i, "t_w": t_w, "t_comm": t_comm}
    row = {**V_ROW, "p": str(p), "m": str(m), **{name: str(t) for name, t in times.items()}}
    problem = problem_of_row(row, microbatches_held=p, halves=True)
    orders = finished(problem, zb_v(problem))
    assert lower_bound(problem) == pytest.approx(evaluate(problem, orders).time, rel=1e-8)
    assert evaluate(problem, zb_v(problem)).time > 1.0002 * lower_bound(problem)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000 if IS_LONG else 30))
def test_actions_are_the_same_and_those_up_to_the_last_forward_stay(seed: int) -> None:
    problem = random_problem(seed, num_ranks=(1, 5), num_microbatches=(1, 9))
    policies = [one for one in grid(problem) if FULL not in {c & 3 for c in one.preference[0]}]
    orders = dispatch(problem, policies[seed % len(policies)])
    made = finished(problem, orders)
    for before, after in zip(orders, made, strict=True):
        last = max(index for index, code in enumerate(before) if code & 3 == FORWARD)
        assert before[: last + 1] == after[: last + 1]
        assert sorted(before) == sorted(after)
    problem.schedule(made).verify(costs=problem.costs, memory=problem.caps)


def test_weight_backwards_let_later_stages_go_first_and_fill_the_rest() -> None:
    """Stages 0 and 3 are on rank 0, which has an I of stage 3 to send and then waits for its end.

    There is time for W before I comes back to stage 0.
    """
    problem = Problem.of(CostTable.uniform(4, stages_per_rank=2), Placement.v(2), 1)
    late = [[0, 12, 12 + INPUT, INPUT, WEIGHT, 12 + WEIGHT], [4, 8, 9, 5, 10, 6]]
    first, second = finished(problem, late)
    assert [0, 12, 12 + INPUT, 12 + WEIGHT, INPUT, WEIGHT] == first
    assert [4, 8, 9, 5, 10, 6] == second
    assert evaluate(problem, [first, second]).time < evaluate(problem, late).time


def test_weight_backward_may_delay_the_first_stage_if_there_is_time() -> None:
    problem = Problem.of(
        CostTable.uniform(2, backward_weight=1.5, delay=0.5), Placement.linear(2), 2
    )
    orders = [[0, 0, INPUT, INPUT, WEIGHT, WEIGHT], [4, 5, 4, 5, 6, 6]]
    expected = {
        0.0: [0, 0, INPUT, INPUT, WEIGHT, WEIGHT],
        99.0: [0, 0, INPUT, WEIGHT, INPUT, WEIGHT],
    }
    for latest, order in expected.items():
        made = finish(problem, orders, [[latest] * 2, [latest] * 2])
        assert made is not None
        assert order == made[0]


def test_ending_that_does_not_fit_is_none() -> None:
    """Each I leaves 2 where F left 1, so the first W must come before the second I."""
    costs = CostTable.uniform(1, after_forward=1, after_input=2)
    orders = [[0, 0, INPUT, WEIGHT, INPUT, WEIGHT]]
    for memory, expected in ((4, [[0, 0, INPUT, INPUT, WEIGHT, WEIGHT]]), (3, None)):
        problem = Problem.of(costs, Placement.linear(1), 2, memory=memory)
        problem.schedule(orders).verify(costs=costs, memory=memory)
        assert expected == finish(problem, orders, [[0.0] * 2])
