"""The search chooses orders and the policy of gathers together."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock import CostTable, Schedule, search, simulate
from penstock.errors import ScheduleError
from penstock.ir import Unshard
from penstock.passes import Gathers, add_gathers, remove_gathers
from penstock.solver import SearchResult, gathered_search
from penstock.solver.placement_choices import default_placements, describe
from penstock.solver.registered_schedules import registered

AHEADS = (0, 1, 2, 4)
POLICIES = [
    policy
    for ahead in AHEADS
    for policy in (
        Gathers.once(ahead=ahead),
        Gathers.per_need(ahead=ahead),
        Gathers.at_most(1, ahead=ahead),
    )
]


def found(gathers: Any, memory: float | None = None, **costs: float) -> SearchResult:
    """The best for two ranks with two stages each."""
    table = CostTable.uniform(4, **costs)
    return search(table, 2, 6, memory=memory, effort=0.02, gathers=gathers)


def count_gathers(schedule: Schedule) -> int:
    return sum(isinstance(action, Unshard) for order in schedule.orders for action in order)


def test_stages_are_gathered_once_where_gathers_are_slow_and_memory_is_plenty() -> None:
    """What is bound by the link gathers each stage once."""
    best = found("auto", gather=4.0, reduce=1.0, gathered=3.0)
    best.schedule.verify()
    assert 4 == count_gathers(best.schedule)
    assert best.time < found(Gathers.at_most(1), gather=4.0, reduce=1.0, gathered=3.0).time


def test_stages_are_freed_in_between_where_memory_is_short() -> None:
    """What is bound by memory uses it for activations, and gathers again."""
    costs = {"gather": 0.25, "reduce": 0.25, "gathered": 6.0}
    best = found("auto", memory=14.0, **costs)
    best.schedule.verify(costs=best.report.costs, memory=14.0)
    assert count_gathers(best.schedule) > 4
    assert best.report.peak_memory <= 14.0
    assert best.time < found(Gathers.once(), memory=14.0, **costs).time


@pytest.mark.parametrize("memory", [None, 12.0])
@pytest.mark.parametrize("gather", [0.25, 4.0])
def test_choice_is_never_worse_than_a_policy(gather: float, memory: float | None) -> None:
    """It once gathered one action early at most, which was slower where gathers are long."""
    costs = {"gather": gather, "reduce": 0.5, "gathered": 2.0}
    best = found("auto", memory, **costs)
    for policy in POLICIES:
        assert best.time <= found(policy, memory, **costs).time
    table = best.report.costs
    for placement in default_placements(4, 2):
        for _, schedule in registered(placement, 6):
            for policy in (Gathers.once(), Gathers.per_need()):
                report = simulate(add_gathers(schedule, policy), table)
                if memory is None or report.peak_memory <= memory:
                    assert best.time <= report.makespan
    assert best.lower_bound <= best.time


def test_schedule_has_the_actions_of_its_policy_and_the_report_is_its_own() -> None:
    best = found(Gathers.per_need(ahead=2), gather=0.5, gathered=1.0)
    assert best.schedule == add_gathers(remove_gathers(best.schedule), Gathers.per_need(ahead=2))
    assert simulate(best.schedule, best.report.costs).makespan == best.time


@pytest.mark.parametrize("memory", [None, 12.0])
def test_table_rates_schedules_with_their_gathers(memory: float | None) -> None:
    """The rows were once of schedules without gathers, which are faster than any with them."""
    costs = {"gather": 2.0, "reduce": 0.5, "gathered": 2.0}
    best = found("auto", memory, **costs)
    table, policies = best.report.costs, {str(policy): policy for policy in POLICIES}
    by_name = {
        (name, describe(placement)): schedule
        for placement in default_placements(4, 2)
        for name, schedule in registered(placement, 6)
    }
    rows = {tuple(tried.name.split(", gathered ")): tried for tried in best.tried}
    assert {policy for _, policy in rows} <= policies.keys()
    registered_rows = [
        (tried, by_name[name, tried.placement], policies[policy])
        for (name, policy), tried in rows.items()
        if (name, tried.placement) in by_name
    ]
    assert len(registered_rows) > 4
    for tried, schedule, policy in registered_rows:
        report = simulate(add_gathers(schedule, policy), table)
        assert (report.makespan, report.peak_memory) == (tried.time, tried.peak_memory)
        assert tried.fits == (memory is None or report.peak_memory <= memory)
    assert best.time == min(tried.time for tried in best.tried if tried.fits)
    assert best.lower_bound <= best.time


def test_time_holds_for_placing_gathers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers were once placed in every schedule, however long that took."""
    now = 0.0

    def place(*args: Any) -> Schedule:
        nonlocal now
        now += 1.0
        return add_gathers(*args)

    monkeypatch.setattr(gathered_search, "add_gathers", place)
    monkeypatch.setattr(gathered_search, "time", SimpleNamespace(monotonic=lambda: now))
    table = CostTable.uniform(4, gather=2.0, gathered=2.0)
    best = search(table, 2, 6, memory=12.0, seconds=20.0, effort=0.02, gathers="auto")
    assert not best.is_complete
    assert 20.0 <= best.seconds < 20.0 + len(POLICIES)
    assert best.schedule.has_sharding
    assert best.report.peak_memory <= 12.0
    soon = search(table, 2, 6, memory=12.0, seconds=0.001, effort=0.02, gathers="auto")
    assert not soon.is_complete
    assert {"one at a time, gathered once"} == {tried.name for tried in soon.tried}


def test_only_stages_with_costs_are_gathered() -> None:
    table = CostTable(
        forward=[1] * 2, backward_input=[1] * 2, backward_weight=[1] * 2, gather=[0.5, 0]
    )
    best = search(table, 2, 3, effort=0.02, gathers=Gathers.once())
    assert 1 == count_gathers(best.schedule)
    free = search(CostTable.uniform(2), 2, 3, effort=0.02, gathers=Gathers.once())
    assert 2 == count_gathers(free.schedule)


def test_without_gathers_nothing_is_gathered() -> None:
    assert not found(None, gather=1.0).schedule.has_sharding


def test_memory_that_is_too_small_is_refused_with_what_is_enough() -> None:
    with pytest.raises(ScheduleError, match=r"Nothing fits: with once as the .* hold 14, but"):
        found(Gathers.once(), memory=8.0, gathered=6.0)
    assert found(Gathers.once(), memory=14.0, gathered=6.0).report.peak_memory <= 14


def test_policy_that_is_not_one_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"gathers is 'once'\. Expected a policy"):
        found("once")
