"""The engine's times are those of an obvious simulation, on schedules and costs of all kinds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import arbitrary, costs_of, generated, perhaps_gathered, with_comms
from reference_engine import simulate_by_relaxation

from fuzzing import examples
from penstock import simulate
from penstock.passes import add_comms


@pytest.mark.fuzz
@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("schedules", [generated(), arbitrary()], ids=["generated", "arbitrary"])
@examples(60, long=5_000)
@given(data=st.data())
def test_engine_agrees_with_relaxation(
    schedules: st.SearchStrategy, blocking: bool, data: st.DataObject
) -> None:
    schedule = data.draw(perhaps_gathered(data.draw(schedules)))
    costs = data.draw(costs_of(schedule))
    if blocking:  # A receive that is posted early may then wait forever.
        schedule = add_comms(schedule)
    elif data.draw(st.booleans()):
        schedule = data.draw(with_comms(schedule))
    expected = simulate_by_relaxation(schedule, costs, blocking=blocking)
    timeline = simulate(schedule, costs, blocking=blocking).timeline
    assert expected.starts == [list(starts) for starts in timeline.starts]
    assert expected.ends == [list(ends) for ends in timeline.ends]


@pytest.mark.fuzz
@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
@examples(60, long=5_000)
@given(data=st.data())
def test_report_adds_up_on_any_schedule(blocking: bool, data: st.DataObject) -> None:
    schedule = data.draw(perhaps_gathered(data.draw(st.one_of(generated(), arbitrary()))))
    costs = data.draw(costs_of(schedule))
    report = simulate(schedule, costs, blocking=blocking)
    for number, rank in enumerate(report.ranks):
        assert report.makespan - rank.busy == rank.idle.total
        assert min(rank.idle) >= 0
        curve = report.memory(number)
        assert rank.peak_memory == max(point.held for point in curve)
        assert curve[-1].held == 0
        assert sorted(point.time for point in curve) == [point.time for point in curve]


@pytest.mark.fuzz
@examples(60, long=5_000)
@given(data=st.data())
def test_blocking_is_never_faster_than_overlapped(data: st.DataObject) -> None:
    schedule = data.draw(perhaps_gathered(data.draw(st.one_of(generated(), arbitrary()))))
    costs = data.draw(costs_of(schedule))
    overlapped = simulate(schedule, costs)
    blocking = simulate(schedule, costs, blocking=True)
    assert blocking.makespan >= overlapped.makespan
