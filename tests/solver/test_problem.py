"""Questions to the solver: what is checked, and how orders are written as numbers."""

import re
from math import inf, nan
from typing import Any

import pytest
from problems import random_problem

from penstock import CostTable, Placement, schedules, simulate
from penstock.errors import CostError, ScheduleError
from penstock.solver import Problem
from penstock.solver.placement_choices import describe
from penstock.solver.problem import codes
from penstock.solver.registered_schedules import registered
from penstock.solver.shortage import nothing_fits

COSTS = CostTable(
    forward=[1, 2, 3, 4],
    backward_input=[1, 1, 1, 1],
    backward_weight=[1, 1, 1, 1],
    after_forward=[1, 2, 3, 5],
    delay=[0.5, 0.25, 0.5],
    message_bytes=[1, 1, 1],
    bandwidth=[4, 2, 4],
)


def test_messages_take_their_delay_and_transfer_but_none_on_one_rank() -> None:
    problem = Problem.of(COSTS, Placement.v(2), 3)
    assert (0.75, 0.0, 0.75) == problem.delays


def test_offsets_are_when_ranks_first_start_by_span_and_nothing_by_makespan() -> None:
    placement = Placement.linear(4)
    assert (0, 1.75, 4.5, 8.25) == Problem.of(COSTS, placement, 3, clock="span").offsets
    assert (0, 0, 0, 0) == Problem.of(COSTS, placement, 3).offsets


def test_smallest_cap_is_one_microbatch_on_all_stages_of_a_rank() -> None:
    assert (6, 5) == Problem.of(COSTS, Placement.v(2), 3).smallest_caps


def test_full_backward_can_be_better_if_it_is_quicker_or_leaves_less() -> None:
    def fuses(**costs: float) -> bool:
        return Problem.of(CostTable.uniform(2, **costs), Placement.linear(2), 2).fuses(1)

    assert fuses(backward=1.5)
    assert fuses(after_forward=1, after_input=2)
    assert not fuses()
    assert not fuses(backward=2.5, after_forward=1, after_input=0.5)


def test_caps_are_one_for_all_or_one_for_each() -> None:
    placement = Placement.v(2)
    assert (inf, inf) == Problem.of(COSTS, placement, 3).caps
    assert (7, 7) == Problem.of(COSTS, placement, 3, memory=7).caps
    assert (7, 9) == Problem.of(COSTS, placement, 3, memory=[7, 9]).caps


@pytest.mark.parametrize("name", ["1F1B", "ZB-V"])
def test_schedule_comes_back_from_its_codes(name: str) -> None:
    schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
    costs = CostTable.uniform(schedule.num_stages)
    problem = Problem.of(costs, schedule.placement, 8)
    assert schedule == problem.schedule(codes(schedule))


def test_microbatches_in_order_take_no_longer_and_hold_the_same() -> None:
    """DualPipeV runs its microbatches out of order on some stages."""
    schedule = schedules.get("DualPipeV")(num_ranks=4, num_microbatches=10)
    costs = CostTable.uniform(8, stages_per_rank=2, backward_weight=0.5, delay=0.1)
    problem = Problem.of(costs, schedule.placement, 10)
    before, after = simulate(schedule, costs), simulate(problem.schedule(codes(schedule)), costs)
    assert after.makespan <= before.makespan
    held = [rank.peak_memory for rank in before.ranks]
    assert held == pytest.approx([rank.peak_memory for rank in after.ranks])


def test_nothing_fits_names_the_rank_and_the_smallest_memory() -> None:
    problem = Problem.of(COSTS, Placement.v(2), 3, memory=[7, 4.5])
    assert 1 == problem.find_shortage()
    expected = (
        "Nothing fits: rank 1 may hold 4.5, but one microbatch on its stages [1, 2] needs 5. The "
        "smallest memory that fits is 6 on each rank: allow that"
    )
    assert str(nothing_fits([problem])).startswith(expected)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"costs": 3}, CostError, "costs is 3. Expected a penstock.CostTable."),
    ({"placement": [0, 1]}, ScheduleError, "placement is [0, 1]. Expected a Placement"),
    ({"placement": Placement.v(3)}, CostError, "The costs are for 4 stages, but the placement has"),
    ({"num_microbatches": 0}, ScheduleError, "num_microbatches is 0. Expected a whole number"),
    ({"num_microbatches": 1.5}, ScheduleError, "num_microbatches is 1.5. Expected a whole"),
    ({"clock": "wall"}, ScheduleError, "clock is 'wall'. Expected 'makespan' or 'span'."),
    ({"memory": [1]}, CostError, "memory has 1 values, but there are 4 ranks."),
    ({"memory": nan}, CostError, "memory is nan. Expected numbers, in the costs' unit."),
    (
        {"placement": Placement([0, 1, 0, 2]), "clock": "span"},
        ScheduleError,
        "clock is 'span', but rank 2 has its first stage, 3, after another rank's second.",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_question_is_rejected(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    question = {"costs": COSTS, "placement": Placement.linear(4), "num_microbatches": 2, **changes}
    with pytest.raises(error, match=re.escape(message)):
        Problem.of(**question)


def test_every_registered_schedule_with_a_backward_is_found_by_its_placement() -> None:
    found = {
        name
        for placement in (
            Placement.linear(4),
            Placement.v(4),
            Placement.loop(4, stages_per_rank=2),
        )
        for name, _ in registered(placement, 16)
    }
    assert set(schedules.names()) - {"ForwardOnly"} == found


def test_placement_of_one_s_own_has_no_registered_schedule() -> None:
    assert [] == list(registered(Placement([0, 1, 1]), 4))
    assert [] == list(registered(Placement([1, 0]), 4))


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement.linear(3), "linear"),
        (Placement.v(3), "V, 2 per rank"),
        (Placement.loop(3, stages_per_rank=3), "loop, 3 per rank"),
        (Placement([0, 1, 1]), "own"),
    ],
)
def test_placement_is_described(placement: Placement, words: str) -> None:
    assert words == describe(placement)


def test_random_problems_are_of_all_kinds() -> None:
    """The other tests draw from these."""
    problems = [random_problem(seed) for seed in range(100)]
    assert {"linear", "V, 2 per rank", "loop, 2 per rank"} == {
        describe(problem.placement) for problem in problems
    }
    assert {"makespan", "span"} == {problem.clock for problem in problems}
    assert {True, False} == {problem.caps[0] == inf for problem in problems}
