"""Advice: what limits a step, and what would shorten it."""

import pytest

from penstock import CostTable, Placement, search
from penstock.errors import CostError, ScheduleError
from penstock.solver import Advice, Help

EVEN = CostTable.uniform(4)


def gains(advice: Advice) -> dict[str, float]:
    return {help.what: help.gain for help in advice.helps}


def test_heavy_head_limits_the_step_and_equal_stages_help_most() -> None:
    costs = CostTable(
        forward=[1, 1, 1, 3], backward_input=[1, 1, 1, 3], backward_weight=[1, 1, 1, 3]
    )
    found = search(costs, 4, 16, effort=0.1)
    advice = found.advise()
    assert "Rank 3 limits the step: its work takes 2 times the mean." == advice.limit
    moved = advice.helps[0]
    assert "layers moved away from rank 3, for equal stages" == moved.what
    equal = search(
        CostTable.uniform(4, forward=1.5, backward_input=1.5, backward_weight=1.5), 4, 16
    )
    assert pytest.approx(1 - equal.time / found.time, abs=0.01) == moved.gain


def test_slow_links_limit_the_step() -> None:
    found = search(CostTable.uniform(4, delay=3.0), 4, 8, memory=4, effort=0.1)
    advice = found.advise()
    assert "Messages limit the step: ranks wait for them." == advice.limit
    assert 0.1 < gains(advice)["messages twice as fast"] < 0.5


def test_memory_limits_the_step() -> None:
    found = search(EVEN, 4, 32, memory=2, effort=0.1)
    advice = found.advise()
    assert (
        "Memory limits the step: with more of it, ranks could work further ahead." == advice.limit
    )
    doubled = search(EVEN, 4, 32, memory=4, effort=0.1)
    assert pytest.approx(1 - doubled.time / found.time) == gains(advice)["twice the memory"]


def test_few_microbatches_limit_the_step_and_a_v_helps() -> None:
    found = search(EVEN, 4, 4)
    halves = CostTable.uniform(8, stages_per_rank=2)
    advice = found.advise(costs_in_v=halves)
    limit = "Filling and draining the pipe limits the step: microbatches are few."
    assert limit == advice.limit
    twice = search(EVEN, 4, 8)
    expected = 1 - twice.time / 2 / found.time
    assert pytest.approx(expected) == gains(advice)["twice as many microbatches of the same size"]
    in_v = search(halves, 4, 4, placements=[Placement.v(4)])
    expected = 1 - in_v.time / found.time
    assert pytest.approx(expected) == gains(advice)["two stages per rank, in a V"]
    assert sorted(gains(advice).values(), reverse=True) == [*gains(advice).values()]


def test_full_pipe_is_limited_by_its_work() -> None:
    advice = search(EVEN, 1, 4).advise()
    assert "The work itself limits the step: ranks are idle for 0.0% of the time." == advice.limit
    assert () == advice.helps


def test_nothing_helps_that_does_not_fit() -> None:
    costs = CostTable.uniform(8, stages_per_rank=2, after_forward=100.0)
    found = search(EVEN, 4, 8, memory=4, effort=0.1)
    assert "two stages per rank, in a V" not in gains(found.advise(costs_in_v=costs))


def test_advice_is_a_line_for_each_fact() -> None:
    advice = Advice("Memory limits the step.", (Help("twice the memory", 0.1234),))
    assert "Memory limits the step.\nWhat would help: twice the memory: 12.3% less time." == str(
        advice
    )


def test_head_whose_scales_are_larger_limits_the_step_too() -> None:
    """The same times, once as scales of a stage's row and once as times of the stage."""
    ones = {name: [1, 1] for name in ("forward", "backward_input", "backward_weight")}
    threes = {name: [1, 3] for name in ones}
    scaled = CostTable(**ones, time_scale=[[1.0] * 6, [3.0] * 6])
    advice, same = (
        search(costs, 2, 6, effort=0.1).advise() for costs in (scaled, CostTable(**threes))
    )
    assert (
        same.limit == advice.limit == "Rank 1 limits the step: its work takes 1.5 times the mean."
    )
    assert gains(same).keys() == gains(advice).keys()


def test_advice_that_cannot_be_meant_is_refused() -> None:
    costs = CostTable.uniform(2).for_lengths([1, 1, 1, 9], measured_length=1)
    found = search(costs, 2, 4, effort=0.05)
    with pytest.raises(ScheduleError, match=r"effort is nan\. Expected a finite number above 0"):
        found.advise(effort=float("nan"))
    with pytest.raises(ScheduleError, match=r"seconds is -1\. Expected a finite number above 0"):
        found.advise(seconds=-1)
    with pytest.raises(CostError, match="costs_in_v has scales for None microbatches, which are"):
        found.advise(costs_in_v=CostTable.uniform(4, stages_per_rank=2))


def test_free_messages_are_not_advised_and_a_gain_of_searching_is_named() -> None:
    """A brief search that beat what little effort had found was credited to faster messages."""
    costs = CostTable(
        forward=[3, 3, 3, 9],
        backward_input=[3, 3, 3, 9],
        backward_weight=[3, 3, 3, 9],
        time_scale=[1, 2, 3, 4, 5, 6],
    )
    found = search(costs, 4, 6, effort=0.001)
    helps = gains(found.advise())
    assert not any("messages" in what for what in helps)
    assert "layers moved away from rank 3, for equal stages" in helps
