"""The search: never worse than what is registered, within memory and time, the same each time."""

import re
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from problems import random_problem
from published_rows import V_ROW, read_rows, search_row

from fuzzing import IS_LONG
from penstock import CostTable, Placement, SearchResult, search, simulate
from penstock.errors import CostError, ScheduleError
from penstock.ir import Backward, BackwardInput
from penstock.solver import Problem
from penstock.solver.registered_schedules import registered

COSTS = CostTable(forward=[2, 2, 2, 3], backward_input=[2, 2, 2, 3], backward_weight=[1, 1, 1, 2])


def find(problem: Problem, **changes: Any) -> SearchResult:
    question = {
        "memory": problem.caps,
        "placements": [problem.placement],
        "clock": problem.clock,
        **changes,
    }
    return search(problem.costs, problem.num_ranks, problem.num_microbatches, **question)


def costs_with_messages_that_queue(problem: Problem, seed: int) -> CostTable:
    """The same with messages that keep their channel busy."""
    random = Random(seed)
    return replace(
        problem.costs,
        message_bytes=tuple(random.randint(0, 3) for _ in problem.costs.delay),
        bandwidth=tuple(random.randint(1, 3) for _ in problem.costs.delay),
    )


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(2000 if IS_LONG else 30))
def test_no_registered_schedule_that_fits_is_faster(seed: int) -> None:
    problem = random_problem(
        seed,
        num_ranks=(1, 5),
        num_microbatches=(1, 10),
        fuses=seed % 3 == 0,
        leaves_more=seed % 4 == 0,
        works=seed % 5 > 2,
    )
    if seed % 5 == 0:
        problem = replace(problem, costs=costs_with_messages_that_queue(problem, seed))
    found = find(problem, effort=0.05)
    found.schedule.verify(costs=problem.costs, memory=problem.caps)
    assert found.time == problem.time_of(simulate(found.schedule, problem.costs))
    assert found.time >= found.lower_bound * (1 - 1e-9)
    for name, schedule in registered(problem.placement, problem.num_microbatches):
        report = simulate(schedule, problem.costs)
        if problem.find_excess(report) is None:
            assert found.time <= problem.time_of(report), name


def test_registered_schedules_count_as_the_simulator_times_them() -> None:
    """Messages that wait for each other: what seems to be faster than these is not."""
    problem = random_problem(475, num_ranks=(2, 3), num_microbatches=(2, 6))
    costs = replace(problem.costs, message_bytes=(7, 5, 30), bandwidth=(1, 1, 1))
    problem = replace(problem, costs=costs)
    reports = [
        simulate(schedule, costs)
        for _, schedule in registered(problem.placement, problem.num_microbatches)
    ]
    fit = [problem.time_of(report) for report in reports if problem.find_excess(report) is None]
    assert find(problem, effort=0.01).time <= min(fit)


ROWS = read_rows() if IS_LONG else read_rows()[:1]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['m']}")


@pytest.mark.fuzz
@every_row
def test_published_bubbles_are_reached_at_the_memory_of_1f1b(row: dict[str, str]) -> None:
    """And the bound says that on one stage per rank they cannot be beaten."""
    found = search_row(row, microbatches_held=int(row["p"]), halves=False)
    assert round(found.report.bubble_by_span, 4) <= float(row["zb_1p"])
    assert 0 == found.gap


@pytest.mark.fuzz
@every_row
def test_published_bubbles_are_reached_at_twice_the_memory(row: dict[str, str]) -> None:
    found = search_row(row, microbatches_held=2 * int(row["p"]), halves=False)
    assert round(found.report.bubble_by_span, 4) <= float(row["zb_2p"])


@pytest.mark.fuzz
@every_row
def test_half_of_the_published_bubbles_is_reached_in_a_v(row: dict[str, str]) -> None:
    found = search_row(row, microbatches_held=int(row["p"]), halves=True)
    assert round(found.report.bubble_by_span, 4) <= float(row["zb_1p"]) / 2


@pytest.mark.parametrize(("p", "m"), [(16, 48), (24, 96)])
def test_published_bubble_of_a_v_is_reached_and_proven_to_be_the_best(p: int, m: int) -> None:
    row = {**V_ROW, "p": str(p), "m": str(m)}
    found = search_row(row, microbatches_held=p, halves=True)
    assert 0 == found.gap
    if (p, m) == (16, 48):
        assert round(found.report.bubble_by_span, 4) <= float(V_ROW["zb_v"])


def test_same_question_gets_the_same_answer() -> None:
    problem = random_problem(5)
    first, second = find(problem, effort=0.03), find(problem, effort=0.03)
    assert [True, True] == [first.is_complete, second.is_complete]
    assert first.schedule == second.schedule
    assert first.tried == second.tried


def test_more_effort_finds_better() -> None:
    problems = [random_problem(seed) for seed in (45, 49)]
    little = [find(problem, effort=0.01).time for problem in problems]
    much = [find(problem, effort=0.1).time for problem in problems]
    assert sum(much) < sum(little)
    assert all(a <= b * 1.02 for a, b in zip(much, little, strict=True))


def test_search_stops_when_its_time_is_up() -> None:
    costs = CostTable(
        forward=[1 + s % 3 / 7 for s in range(16)],
        backward_input=[1 + s % 2 / 7 for s in range(16)],
        backward_weight=[0.5] * 16,
        delay=0.1,
    )
    found = search(costs, 16, 64, memory=10, seconds=0.1)
    assert not found.is_complete
    assert "stopped after" in str(found)
    [policies] = [tried for tried in found.tried if tried.name == "policies"]
    assert 10 > policies.count  # Of 72.
    found.schedule.verify(costs=costs, memory=10)
    [least] = [tried for tried in found.tried if tried.name == "one at a time"]
    assert found.time < least.time / 2


def test_number_of_stages_decides_which_placements_are_tried() -> None:
    def places(num_stages: int, num_ranks: int) -> set[str]:
        found = search(CostTable.uniform(num_stages), num_ranks, 4, effort=0.02)
        return {tried.placement for tried in found.tried}

    assert {"linear"} == places(4, 4)
    assert {"loop, 2 per rank", "V, 2 per rank"} == places(4, 2)
    assert {"loop, 3 per rank", "V, 3 per rank"} == places(6, 2)
    assert {"loop, 3 per rank"} == places(3, 1)  # A V on one rank is no other.


def test_placement_of_one_s_own() -> None:
    found = search(COSTS, 2, 4, placements=[Placement([0, 1, 1, 0]), Placement([0, 0, 1, 1])])
    assert found.schedule.placement in (Placement([0, 1, 1, 0]), Placement([0, 0, 1, 1]))
    assert {"V, 2 per rank", "own"} >= {tried.placement for tried in found.tried}


def test_memory_may_differ_from_rank_to_rank() -> None:
    found = search(COSTS, 4, 8, memory=[8, 2, 3, 4], effort=0.1)
    held = [rank.peak_memory for rank in found.report.ranks]
    assert all(a <= b for a, b in zip(held, [8, 2, 3, 4], strict=True))


def test_full_backwards_are_used_if_halves_are_slow() -> None:
    costs = CostTable.uniform(2, backward_input=1.0, backward_weight=2.0, backward=2.0)
    found = search(costs, 2, 8, effort=0.1)
    kinds = [type(action) for order in found.schedule.orders for action in order]
    assert Backward in kinds
    assert found.time < simulate(found.schedule.from_csv(halves(found)), costs).makespan


def halves(found: SearchResult) -> str:
    return re.sub(r"(\d+)B(\d+)", r"\1I\2,\1W\2", found.schedule.to_csv())


def test_full_backwards_are_cut_if_halves_are_quicker() -> None:
    costs = CostTable.uniform(2, backward_input=1.0, backward_weight=0.5, backward=2.0)
    found = search(costs, 2, 8)
    kinds = {type(action) for order in found.schedule.orders for action in order}
    assert BackwardInput in kinds
    assert Backward not in kinds


def test_input_backwards_that_leave_more_than_they_free_keep_to_the_memory() -> None:
    """At the smallest cap only full backwards fit; with a little more, halves do in part."""
    costs = CostTable.uniform(2, after_forward=1, after_input=3)
    times = []
    for cap in (1, 3, 6):
        found = search(costs, 2, 6, memory=cap, effort=0.1)
        found.schedule.verify(costs=costs, memory=cap)
        times.append(found.time)
    assert times[0] > times[-1]


def test_one_placement_at_its_bound_does_not_end_the_search_of_the_other() -> None:
    """The loop is proven to be as good as can be at once; the V is faster."""
    costs = CostTable(
        forward=[1, 1, 1, 9], backward_input=[1, 1, 1, 9], backward_weight=[1, 1, 1, 9]
    )
    found = search(costs, 2, 6, effort=0.2)
    each = [
        search(costs, 2, 6, placements=[placement], effort=0.2)
        for placement in (Placement.loop(2, stages_per_rank=2), Placement.v(2))
    ]
    assert min(one.time for one in each) == found.time
    assert each[0].lower_bound != each[1].lower_bound
    assert min(one.lower_bound for one in each) == found.lower_bound


def test_smallest_memory_that_fits_is_named_and_fits() -> None:
    message = (
        "Nothing fits: rank 3 may hold 4.5, but one microbatch on its stages [3] needs 5. The "
        "smallest memory that fits is 5 on each rank: allow that, use smaller microbatches, or cut "
        "the model into more stages."
    )
    costs = replace(COSTS, after_forward=(1, 2, 3, 5))
    with pytest.raises(ScheduleError, match=re.escape(message)):
        search(costs, 4, 8, memory=4.5)
    assert 5 == search(costs, 4, 8, memory=5, effort=0.1).report.peak_memory


def test_smallest_memory_is_that_of_the_leanest_placement() -> None:
    """In a V the two heavy stages share a rank; in a loop they do not."""
    costs = replace(COSTS, after_forward=(4, 1, 1, 4))
    with pytest.raises(ScheduleError, match="The smallest memory that fits is 5 on each rank"):
        search(costs, 2, 4, memory=4)
    assert {"loop, 2 per rank"} == {
        tried.placement for tried in search(costs, 2, 4, memory=5, effort=0.1).tried
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_ranks": 3}, "The costs are for 4 stages, which cannot be divided evenly among 3"),
    ({"num_ranks": 0}, "num_ranks is 0. Expected a whole number, at least 1."),
    ({"num_ranks": 2.0}, "num_ranks is 2.0. Expected a whole number, at least 1."),
    ({"seconds": 0}, "seconds is 0. Expected a finite number above 0."),
    ({"effort": "much"}, "effort is 'much'. Expected a finite number above 0."),
    ({"effort": float("inf")}, "effort is inf. Expected a finite number above 0."),
    (
        {"placements": Placement.linear(4)},
        "placements is Placement(ranks=(0, 1, 2, 3)). Expected several to choose from: give",
    ),
    ({"placements": []}, "placements is empty. Give at least one, or leave it out."),
    ({"placements": [Placement.v(2)]}, "placements holds Placement(ranks=(0, 1, 1, 0)). Expected"),
    ({"placements": ["V"]}, "placements holds 'V'. Expected a Placement on 4 ranks, such as"),
    ({"clock": "wall"}, "clock is 'wall'. Expected 'makespan' or 'span'."),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_argument_is_rejected(changes: dict[str, Any], message: str) -> None:
    question = {"num_ranks": 4, "num_microbatches": 4, **changes}
    with pytest.raises(ScheduleError, match=re.escape(message)):
        search(COSTS, **question)


def test_costs_that_are_no_table_are_rejected() -> None:
    with pytest.raises(CostError, match=r"costs is \[1, 2\]\. Expected a penstock\.CostTable\."):
        search([1, 2], 2, 2)  # type: ignore[arg-type]


def test_bound_of_nothing_is_no_proof() -> None:
    """With every F hidden behind a backward, nothing might be left; but the backwards are none."""
    costs = CostTable.uniform(4, backward_input=0, backward_weight=0, overlap_saving=1)
    found = search(costs, 4, 8, effort=0.1)
    assert found.lower_bound >= 8
    nothing = replace(found, lower_bound=0.0)
    assert float("inf") == nothing.gap


def test_what_was_found_is_among_what_was_tried() -> None:
    costs = CostTable(
        forward=[10, 12, 9, 15], backward_input=[11, 12, 9, 14], backward_weight=[8, 9, 7, 12]
    )
    found = search(costs, 4, 8, memory=[4, 3, 2, 1], effort=0.1)
    assert found.time == min(tried.time for tried in found.tried if tried.fits)
    assert all(tried.count > 0 for tried in found.tried)
    for seed in range(8):
        found = find(random_problem(seed), effort=0.05)
        assert found.time == min(tried.time for tried in found.tried if tried.fits)


def test_result_is_a_table_of_what_was_tried() -> None:
    found = search(COSTS, 4, 8, memory=4)
    lines = str(found).splitlines()
    assert "makespan 70, bound 70, gap 0.00%" == lines[0]
    assert ["makespan", "memory", "fits", "of", "placement", "tried"] == lines[1].split()
    assert any(re.fullmatch(r" +\S+ +8 +no +1 +linear +GPipe", line) for line in lines)
    times = [float(line.split()[0]) for line in lines[2:] if " yes " in line]
    assert sorted(times) == times
    assert "SearchResult(makespan=70, lower_bound=70, gap=0.00%, peak_memory=4)" == repr(found)


def test_memory_that_is_an_array_of_one_number_is_refused() -> None:
    """It can be iterated by its type alone, and was an error of numpy's."""
    with pytest.raises(CostError, match=r"memory is 3.0. Expected numbers, in the costs' unit"):
        search(CostTable.uniform(2), 2, 2, memory=np.array(3.0))
