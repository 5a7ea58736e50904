"""The best over several numbers of stages."""

import pytest

from limits import HANG_S
from penstock.costs.given_costs import ShareCosts
from penstock.errors import ScheduleError
from penstock.solver import search
from penstock.solver.best_schedule import find_best
from penstock.solver.placement_choices import default_placements
from penstock.solver.question import Question

GROUPS = [default_placements(4, 4), default_placements(8, 4)]


def question(memory: float | None = None) -> Question:
    return Question(ShareCosts(forward=(1.0, 1.0, 2.0)), 4, 8, memory, "makespan")


def test_best_is_the_fastest_of_all_and_its_bound_that_of_all() -> None:
    asked = question()
    found = find_best(asked, GROUPS, seconds=HANG_S, effort=0.1)
    each = [
        search(asked.costs.table(group[0]), 4, 8, placements=group, effort=0.1) for group in GROUPS
    ]
    assert min(one.time for one in each) == found.time
    assert each[0].lower_bound != each[1].lower_bound
    assert min(one.lower_bound for one in each) == found.lower_bound
    assert [*each[0].tried, *each[1].tried] == [*found.tried]


def test_group_that_does_not_fit_is_left_out() -> None:
    costs = ShareCosts(after_forward=(1.0, 2.0, 3.0, 4.0))
    asked = Question(costs, 2, 8, 2.5, "makespan")
    groups = [default_placements(2, 2), default_placements(4, 2)]
    assert 4 == find_best(asked, groups, seconds=HANG_S, effort=0.1).schedule.num_stages
    with pytest.raises(ScheduleError, match="Nothing fits: rank 1 may hold"):
        find_best(asked, groups[:1], seconds=HANG_S, effort=0.1)


def test_seconds_are_shared_by_the_groups() -> None:
    found = find_best(question(4), GROUPS, seconds=0.002, effort=10)
    assert not found.is_complete
