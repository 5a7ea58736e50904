"""What a report says of a timeline: idle time by phase, memory over time, and its text."""

import math
from collections.abc import Iterator

import pytest

from penstock import CostTable, Placement, Schedule, schedules, simulate
from penstock.ir import Backward, Forward
from penstock.schedules import REGISTRY, Generator, Shape
from penstock.timeline import Idle, MemoryPoint, TimedAction
from shapes import make, shapes

# F 1, I 1, W 1:
# rank 0  F0 F1 .  .  B0 B0 .  B1 B1      1F1B on two ranks takes 9.
# rank 1  .  F0 B0 B0 F1 B1 B1 .  .
ONE_F_ONE_B = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")


def every_shape() -> Iterator[tuple[Generator, Shape]]:
    """Every algorithm in a few shapes."""
    for generator in REGISTRY:
        for shape in shapes(generator, ranks=[1, 3], microbatches=[2, 7], stages_per_rank=[1, 3]):
            yield generator, shape


def uneven_costs(num_stages: int) -> CostTable:
    """Different costs for every stage and edge: times in quarters, which add up exactly."""
    stages, edges = range(num_stages), range(num_stages - 1)
    return CostTable(
        forward=[1 + stage % 3 / 4 for stage in stages],
        backward_input=[1.5 + stage % 2 / 2 for stage in stages],
        backward_weight=[0.75 + stage % 5 / 4 for stage in stages],
        after_forward=[(3 + stage % 3) / 3 for stage in stages],
        after_input=0.1,
        delay=[0.25 + edge % 3 / 4 for edge in edges],
        message_bytes=[1 + edge % 2 for edge in edges],
        bandwidth=4.0,
    )


def test_idle_time_is_split_where_backwards_begin_and_forwards_end() -> None:
    report = simulate(ONE_F_ONE_B)
    # Rank 0 has run all its forwards before its first backward: it has no steady phase.
    assert Idle(warm_up=2, steady=0, cool_down=1) == report.ranks[0].idle
    assert Idle(warm_up=1, steady=0, cool_down=2) == report.ranks[1].idle
    assert 3 == report.ranks[0].idle.total


def test_idle_time_between_first_backward_and_last_forward_is_steady() -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=3)
    report = simulate(schedule, CostTable.uniform(2, delay=2))
    # rank 0  F0 F1 .  .  .  .  .  .  B0 B0 F2 B1 B1 .  .  .  .  .  B2 B2
    # rank 1  .  .  .  F0 B0 B0 F1 B1 B1 .  .  .  .  F2 B2 B2 .  .  .  .
    assert [9.0, 9.0] == [rank.busy for rank in report.ranks]
    assert 20 == report.makespan
    assert Idle(warm_up=6, steady=0, cool_down=5) == report.ranks[0].idle
    assert Idle(warm_up=3, steady=4, cool_down=4) == report.ranks[1].idle


def test_idle_time_of_forwards_alone_is_warm_up_until_the_first_and_cool_down_after_the_last() -> (
    None
):
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1\n2F0,2F1\n")
    costs = CostTable(forward=[1, 3, 1], backward_input=[1] * 3, backward_weight=[1] * 3)
    # rank 0  F0 F1 .  .  .  .  .  .
    # rank 1  .  F0 F0 F0 F1 F1 F1 .
    # rank 2  .  .  .  .  F0 .  .  F1
    report = simulate(schedule, costs)
    expected = [Idle(0, 0, 6), Idle(1, 0, 1), Idle(4, 2, 0)]
    assert expected == [rank.idle for rank in report.ranks]


def test_rank_has_its_own_first_start_last_end_and_span() -> None:
    report = simulate(schedules.get("ZB-H2")(num_ranks=3, num_microbatches=6))
    assert [(0, 18), (1, 19), (2, 20)] == [(r.first_start, r.last_end) for r in report.ranks]
    assert [18, 18, 18] == [rank.span for rank in report.ranks]
    assert (20, 18) == (report.makespan, report.span)
    assert math.isclose(0.1, report.bubble_by_makespan)
    assert 0 == report.bubble_by_span


def test_span_is_that_of_the_rank_for_which_it_is_largest() -> None:
    schedule = Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    for weights, expected in (([1, 10], [5, 12]), ([10, 1], [14, 3])):
        costs = CostTable(forward=[1, 1], backward_input=[1, 1], backward_weight=weights)
        report = simulate(schedule, costs)
        assert expected == [rank.span for rank in report.ranks]
        assert max(expected) == report.span


def test_bubble_of_uneven_stages_counts_what_each_rank_computes() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")
    costs = CostTable(forward=[1, 3], backward_input=[1, 3], backward_weight=[1, 3])
    report = simulate(schedule, costs)
    assert [3, 9] == [rank.busy for rank in report.ranks]
    assert (12, 12) == (report.makespan, report.span)
    assert 0.5 == report.bubble_by_makespan == report.bubble_by_span


def test_uneven_stages_have_a_bubble_in_every_period() -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=100)
    costs = CostTable(forward=[1, 3], backward_input=[1, 3], backward_weight=[1, 3])
    report = simulate(schedule, costs)
    assert 1 + 100 * 9 + 2 == report.makespan
    assert 1 - 600 / 903 == report.bubble_by_makespan


def test_rounding_makes_no_bubble_negative() -> None:
    """The sum of 36 times 0.1 is not 3.6: the rate came out as -2e-16, and was shown as -0.00%."""
    schedule = schedules.get("GPipe")(num_ranks=1, num_microbatches=12)
    tenths = CostTable.uniform(1, forward=0.1, backward_input=0.1, backward_weight=0.1)
    report = simulate(schedule, tenths)
    assert report.bubble_by_makespan >= 0
    assert report.bubble_by_span >= 0
    assert "-" not in str(report).splitlines()[0]


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
def test_idle_time_by_phase_adds_up(blocking: bool) -> None:
    """As on any schedule: see sim/test_engine_fuzz.py."""
    for generator, shape in every_shape():
        schedule = make(generator, shape)
        report = simulate(schedule, uneven_costs(schedule.num_stages), blocking=blocking)
        for rank in report.ranks:
            assert report.makespan - rank.busy == rank.idle.total, (generator, shape)
            assert min(rank.idle) >= 0, (generator, shape)
            assert 0 <= rank.first_start < rank.last_end <= report.makespan, (generator, shape)


def test_memory_rises_when_a_forward_starts_and_falls_when_a_backward_ends() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1B0,1B1\n")
    costs = CostTable.uniform(2, after_forward=8.0, after_input=3.0)
    report = simulate(schedule, costs)
    # rank 0  F0 F1 .  .  .  I0 W0 B1 B1
    expected = [(0, 0), (0, 8), (1, 16), (6, 11), (7, 8), (9, 0)]
    assert [MemoryPoint(*point) for point in expected] == report.memory(0)
    assert 16 == report.ranks[0].peak_memory == report.peak_memory


def test_memory_is_that_of_each_stage() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")
    costs = CostTable.uniform(2)
    uneven = CostTable(
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        after_forward=[5, 7],
    )
    report = simulate(schedule, uneven)
    assert [5, 7] == [rank.peak_memory for rank in report.ranks]
    assert 7 == report.peak_memory


def test_memory_that_grows_with_the_input_backward_counts() -> None:
    """What W needs may be more than what I did: gradients are as large as activations."""
    schedule = Schedule.from_csv("0F0,0I0,0W0\n")
    report = simulate(schedule, CostTable.uniform(1, after_forward=1.0, after_input=3.0))
    assert [(0, 0), (0, 1), (2, 3), (3, 0)] == report.memory(0)
    assert 3 == report.peak_memory


def test_forwards_alone_hold_memory_only_while_they_run() -> None:
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1\n")
    costs = CostTable.uniform(2, after_forward=4.0)
    report = simulate(schedule, costs)
    assert [4, 4] == [rank.peak_memory for rank in report.ranks]
    assert [(0, 0), (1, 4), (2, 0), (2, 4), (3, 0)] == report.memory(1)


def test_memory_ends_at_zero_and_peaks_at_peak_memory() -> None:
    for generator, shape in every_shape():
        schedule = make(generator, shape)
        report = simulate(schedule, uneven_costs(schedule.num_stages))
        for rank in range(shape.p):
            curve = report.memory(rank)
            assert MemoryPoint(0.0, 0.0) == curve[0], shape
            assert 0 == pytest.approx(curve[-1].held, abs=1e-9), shape
            assert max(point.held for point in curve) == report.ranks[rank].peak_memory, shape
            assert [p.time for p in curve] == sorted(p.time for p in curve), shape


def test_actions_are_listed_rank_by_rank_with_their_times() -> None:
    report = simulate(Schedule.from_csv("0F0,0B0\n1F0,1B0\n"))
    expected = [
        TimedAction(0, Forward(0, 0), 0, 1),
        TimedAction(0, Backward(0, 0), 4, 6),
        TimedAction(1, Forward(1, 0), 1, 2),
        TimedAction(1, Backward(1, 0), 2, 4),
    ]
    assert expected == list(report.actions())


def test_text_of_a_report_is_a_table() -> None:
    report = simulate(ONE_F_ONE_B, CostTable.uniform(2, after_forward=1536.25))
    expected = (
        "makespan 9 (bubble 33.33%), span 9 (bubble 33.33%)\n"
        "rank  busy  warm-up  steady  cool-down  peak memory\n"
        "   0     6        2       0          1       3072.5\n"
        "   1     6        1       0          2       1536.2"
    )
    assert expected == str(report)


def test_repr_of_a_report_is_one_line_of_results() -> None:
    report = simulate(schedules.get("ZB-H2")(num_ranks=3, num_microbatches=6))
    expected = (
        "Report(makespan=20, span=18, bubble_by_makespan=0.1000, "
        "bubble_by_span=0.0000, peak_memory=5)"
    )
    assert expected == repr(report)


def test_stage_between_two_others_of_its_rank_is_reported_with_them() -> None:
    """An explicit placement: stages 0 and 1 are neighbours on rank 1, stage 2 is alone."""
    placement = Placement([1, 1, 0])
    orders = [
        [Forward(2, 0), Backward(2, 0)],
        [Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)],
    ]
    report = simulate(Schedule(orders, placement, 1), CostTable.uniform(3, delay=5))
    assert 3 * 3 + 2 * 5 == report.makespan
    assert [(7, 10), (0, 19)] == [(rank.first_start, rank.last_end) for rank in report.ranks]
    assert [1, 2] == [rank.peak_memory for rank in report.ranks]
