"""The memory cap: one for all ranks or one for each, and where it is passed."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.costs import CostTable
from penstock.errors import CostError, ScheduleError
from penstock.ir import Schedule
from penstock.passes import add_comms, verify
from penstock.schedules import get
from penstock.sim import simulate

# Rank 0 holds two microbatches at most, rank 1 one.
TEXT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
RULE = (
    "Let fewer forwards run ahead, raise memory, "
    "or use a schedule that holds less, such as V-Half or V-Min."
)


def costs_of(
    num_stages: int, after_forward: float | list[float] = 1.0, after_input: float = 0.25
) -> CostTable:
    ones = [1.0] * num_stages
    return CostTable(
        forward=ones,
        backward_input=ones,
        backward_weight=ones,
        after_forward=after_forward,
        after_input=after_input,
    )


def peak_of(text: str, costs: CostTable) -> float:
    """The smallest cap, in steps of 1/8, under which a schedule of one rank is accepted."""
    for eighths in range(100):
        try:
            verify(Schedule.from_csv(text), costs=costs, memory=eighths / 8)
        except ScheduleError:
            continue
        return eighths / 8
    raise AssertionError(text)


@pytest.mark.parametrize("memory", [2, math.inf, (2.0, 1.0)])
def test_cap_that_is_kept_is_accepted(memory: float | Sequence[float]) -> None:
    verify(Schedule.from_csv(TEXT), costs=costs_of(2), memory=memory)
    verify(add_comms(Schedule.from_csv(TEXT)), costs=costs_of(2), memory=memory)
    assert Schedule.from_csv(TEXT).verify(costs=costs_of(2), memory=memory) is None


@pytest.mark.parametrize(
    ("memory", "place", "held", "cap"),
    [
        (1.5, "rank 0, position 1", "2", "1.5"),
        (-1, "rank 0, position 0", "1", "-1"),
        ([2, 0.5], "rank 1, position 0", "1", "0.5"),
    ],
)
def test_cap_that_is_passed_is_rejected_at_the_first_place(
    memory: float | Sequence[float], place: str, held: str, cap: str
) -> None:
    schedule = Schedule.from_csv(TEXT)
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, costs=costs_of(2), memory=memory)
    first, excerpt, rule = str(caught.value).split("\n")
    assert f"{place}: the rank holds {held}, but its memory is {cap}" == first
    rank, position = int(place[5]), int(place[-1])
    assert f">{schedule.orders[rank][position]}<" in excerpt
    assert rule == RULE


def test_error_shows_the_excerpt_between_what_is_wrong_and_what_to_do() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_csv(TEXT), costs=costs_of(2), memory=1)
    assert (
        f"rank 0, position 1: the rank holds 2, but its memory is 1\n  0F0 >0F1< 0B0 0B1\n{RULE}"
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "peak"),
    [
        ("0F0,0B0\n", 1.0),
        ("0F0,0F1,0B0,0B1\n", 2.0),
        ("0F0,0B0,0F1,0B1\n", 1.0),
        ("0F0,0I0,0W0,0F1,0I1,0W1\n", 1.0),
        ("0F0,0I0,0F1,0W0,0I1,0W1\n", 1.25),
        ("0F0,0I0,0F1,0I1,0W0,0W1\n", 1.25),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", 2.0),
        ("0F0,(0F1;0I0)OVERLAP_F_B,0F2,0W0,0B1,0B2\n", 2.25),
        ("0F0,0F1,0F2\n", 1.0),
    ],
    ids=[
        "one microbatch",
        "two ahead",
        "one by one",
        "weight backwards at once",
        "one weight backward held",
        "two weight backwards, but not together with a forward",
        "overlap frees at its end",
        "overlap leaves a weight backward",
        "inference keeps nothing",
    ],
)
def test_peak_counts_what_microbatches_hold(text: str, peak: float) -> None:
    assert peak == peak_of(text, costs_of(1))


@pytest.mark.parametrize(
    ("text", "peak"),
    [
        ("0F0,0B0\n", 3.0),
        ("0F0,0F1,0B0,0B1\n", 4.0),
        ("0F0,0I0,0W0\n", 5.25),
        ("0F0,0I0,0F1,0W0,0B1\n", 6.25),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", 4.0),
        ("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n", 6.25),
        ("0F0,0F1,0F2\n", 1.5),
    ],
    ids=[
        "a full backward on top of its activation",
        "two activations",
        "a weight backward on top of what it holds",
        "a weight backward beside a forward",
        "the backward of an overlap beside its forward",
        "a weight backward beside the forward of an overlap",
        "forwards in inference, which leave nothing",
    ],
)
def test_peak_counts_what_an_action_needs_while_it_runs(text: str, peak: float) -> None:
    during = {
        "during_forward": [1.5],  # More than it leaves.
        "during_input": [1.0],
        "during_weight": [5.0],
        "during_backward": [2.0],
    }
    schedule, costs = Schedule.from_csv(text), replace(costs_of(1), **during)
    assert peak == peak_of(text, costs) == simulate(schedule, costs).peak_memory


def test_peak_counts_each_stage_by_its_own_size() -> None:
    costs = costs_of(2, after_forward=[1.0, 3.0])
    assert 4.0 == peak_of("0F0,1F0,1B0,0B0\n", costs)
    assert 3.0 == peak_of("0F0,1F0\n", costs)


def test_weight_backward_may_hold_more_than_the_forward_did() -> None:
    assert 2.0 == peak_of("0F0,0I0,0W0\n", costs_of(1, after_input=2.0))


def test_peak_within_rounding_of_the_cap_is_accepted() -> None:
    costs = costs_of(1, after_forward=0.1)
    text = "0F0,0F1,0F2,0B0,0B1,0B2\n"
    assert 0.1 + 0.1 + 0.1 > 0.3
    verify(Schedule.from_csv(text), costs=costs, memory=0.3)
    with pytest.raises(ScheduleError, match=r"the rank holds 0\.3, but its memory is 0\.2999"):
        verify(Schedule.from_csv(text), costs=costs, memory=0.2999)


def test_rounding_does_not_add_up_over_many_microbatches() -> None:
    text = ",".join(f"0F{mb},0I{mb},0W{mb}" for mb in range(1000))
    costs = costs_of(1, after_forward=0.1, after_input=0.03)
    verify(Schedule.from_csv(text), costs=costs, memory=0.1)


def test_other_rules_come_before_the_cap() -> None:
    with pytest.raises(ScheduleError, match="0B1 runs before 0F1"):
        verify(Schedule.from_csv("0F0,0B1\n"), costs=costs_of(1), memory=0)


def test_cap_without_costs_counts_microbatches_on_a_whole_rank() -> None:
    schedule = get("ZB-V")(num_ranks=3, num_microbatches=8)  # Two stages on each rank.
    verify(schedule, memory=3)
    with pytest.raises(ScheduleError, match=r"the rank holds 3, but its memory is 2\.5"):
        verify(schedule, memory=2.5)


@pytest.mark.parametrize("count", [1, 3])
def test_other_than_one_cap_per_rank_is_rejected(count: int) -> None:
    with pytest.raises(CostError) as caught:
        verify(Schedule.from_csv(TEXT), costs=costs_of(2), memory=[9.0] * count)
    assert (
        f"memory has {count} values, but there are 2 ranks. Give one for each rank, or one for all."
    ) == str(caught.value)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_costs_of_another_number_of_stages_are_rejected(num_stages: int) -> None:
    with pytest.raises(CostError) as caught:
        verify(Schedule.from_csv(TEXT), costs=costs_of(num_stages), memory=9)
    assert (
        f"The costs are for {num_stages} stages, but the schedule has 2. Give costs for each stage."
    ) == str(caught.value)


@pytest.mark.parametrize("memory", [[4.0, math.nan], [4.0, "4"]], ids=["not a number", "text"])
def test_cap_that_is_not_a_number_is_rejected(memory: float | Sequence[float]) -> None:
    expected = f"memory is {memory}. Expected numbers, in the costs' unit."
    with pytest.raises(CostError, match=f"^{re.escape(expected)}$"):
        verify(Schedule.from_csv(TEXT), costs=costs_of(2), memory=memory)


def test_caps_may_be_an_array() -> None:
    schedule = Schedule.from_csv(TEXT)
    verify(schedule, costs=costs_of(2), memory=np.array([9.0, 9.0]))
    with pytest.raises(ScheduleError, match="its memory is 0"):
        verify(schedule, costs=costs_of(2), memory=np.array([9.0, 0.0]))


def test_costs_of_other_stages_are_rejected_without_a_cap_too() -> None:
    with pytest.raises(CostError, match="The costs are for 7 stages, but the schedule has 2"):
        verify(Schedule.from_csv(TEXT), costs=costs_of(7))
