"""Times of actions, on examples small enough to be worked out by hand."""

import math
import re

import pytest
from pipelines import trains, uneven_costs

from penstock import CostTable, Placement, Schedule, schedules, simulate
from penstock.errors import CostError, ScheduleError
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward, Overlap
from penstock.passes import add_comms, fuse_backward, split_backward
from penstock.schedules import REGISTRY, Generator
from penstock.timeline.bubble_report import Report
from shapes import make, shapes

every_generator = pytest.mark.parametrize("generator", REGISTRY, ids=lambda each: each.name)

TWO_RANKS = "0F0,0B0\n1F0,1B0\n"


def times(report: Report) -> dict[str, tuple[float, float]]:
    """Start and end of each action."""
    return {str(timed.action): (timed.start, timed.end) for timed in report.actions()}


def test_action_waits_for_its_rank_and_for_its_input() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    costs = CostTable(forward=[2, 1], backward_input=[1, 3], backward_weight=[1, 1])
    expected = {
        "0F0": (0, 2),
        "0F1": (2, 4),
        "1F0": (2, 3),
        "1B0": (3, 7),
        "0B0": (7, 9),
        "1F1": (7, 8),
        "1B1": (8, 12),
        "0B1": (12, 14),
    }
    assert expected == times(simulate(schedule, costs))


def test_delay_of_its_edge_is_added_in_both_directions() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    report = simulate(schedule, CostTable.uniform(3, backward_weight=0, delay=0.0))
    assert 6 == report.makespan
    costs = CostTable(
        forward=[1] * 3, backward_input=[1] * 3, backward_weight=[0] * 3, delay=[10, 0.5]
    )
    expected = {
        "0F0": (0, 1),
        "1F0": (11, 12),
        "2F0": (12.5, 13.5),
        "2B0": (13.5, 14.5),
        "1B0": (15, 16),
        "0B0": (26, 27),
    }
    assert expected == times(simulate(schedule, costs))


def test_delay_does_not_keep_a_message_behind_another() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0F2\n1F0,1F1,1F2\n")
    report = simulate(schedule, CostTable.uniform(2, delay=10))
    assert (11, 12) == times(report)["1F0"]
    assert (13, 14) == times(report)["1F2"]


def test_nothing_is_sent_between_stages_of_one_rank() -> None:
    schedule = Schedule.from_csv("0F0,1F0,1B0,0B0\n")
    report = simulate(schedule, CostTable.uniform(2, delay=10, message_bytes=1, bandwidth=0.1))
    assert 6 == report.makespan
    v_shaped = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    report = simulate(v_shaped, CostTable.uniform(4, delay=10))
    assert 4 * 3 + 4 * 10 == report.makespan  # Four messages: none between stages 1 and 2.


def test_messages_of_one_channel_are_transferred_one_by_one() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0F2\n1F0,1F1,1F2\n")
    costs = CostTable.uniform(2, message_bytes=12, bandwidth=4, delay=0.5)
    expected = {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0F2": (2, 3),
        "1F0": (4.5, 5.5),  # Transferred from 1 to 4,
        "1F1": (7.5, 8.5),  # from 4 to 7,
        "1F2": (10.5, 11.5),  # and from 7 to 10.
    }
    assert expected == times(simulate(schedule, costs))


def test_messages_of_different_edges_share_the_channel_of_their_ranks() -> None:
    placement = Placement.loop(2, stages_per_rank=2)
    orders = [[Forward(0, 0), Forward(0, 1), Forward(2, 0), Forward(2, 1)]]
    orders += [[Forward(1, 0), Forward(1, 1), Forward(3, 0), Forward(3, 1)]]
    schedule = Schedule(orders, placement, 2)
    costs = CostTable(
        forward=[1, 0, 0, 0],
        backward_input=[1] * 4,
        backward_weight=[1] * 4,
        message_bytes=[4, 0, 4],
        bandwidth=1,
    )
    expected = {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (5, 5),
        "1F1": (9, 9),
        "2F0": (5, 5),
        "2F1": (9, 9),
        "3F0": (13, 13),  # Sent at 5, but the channel is busy until 9.
        "3F1": (17, 17),
    }
    assert expected == times(simulate(schedule, costs))


def test_messages_of_different_channels_do_not_wait_for_each_other() -> None:
    """Rank 1 sends to both its neighbours at once, and rank 0 to it at the same time."""
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n")
    costs = CostTable.uniform(3, backward_weight=0, message_bytes=4, bandwidth=1)
    found = times(simulate(schedule, costs))
    assert (5, 6) == found["1F0"]
    assert (9, 10) == found["1F1"]  # The second message is transferred from 5 to 9.
    assert (10, 11) == found["2F0"]
    assert (11, 12) == found["2B0"]
    assert (14, 15) == found["2F1"]  # Rank 1 sent it at 10, when 1F0's message had arrived.
    assert (16, 17) == found["1B0"]  # Rank 2 sent it at 12, while 1F1's message was under way.
    assert (21, 22) == found["0B0"]


def test_messages_to_different_ranks_are_transferred_at_once() -> None:
    placement = Placement([1, 0, 1, 2])
    orders = [
        [Forward(stage, mb) for stage in stages for mb in range(3)] for stages in ([1], [0, 2], [3])
    ]
    costs = CostTable.uniform(4, message_bytes=4, bandwidth=1)
    found = times(simulate(Schedule(orders, placement, 3), costs))
    assert (10, 11) == found["2F0"]
    # Rank 1 transfers 0F2 to rank 0 from 9 to 13, and 2F0 to rank 2 from 11 on.
    assert (13, 14) == found["1F2"]
    assert (15, 16) == found["3F0"]


def test_full_backward_may_cost_less_than_its_halves() -> None:
    costs = CostTable.uniform(2, backward=1.5)
    schedule = Schedule.from_csv(TWO_RANKS)
    assert 2 + 2 * 1.5 == simulate(schedule, costs).makespan
    split = split_backward(schedule)
    assert 2 + 2 + 1 == simulate(split, costs).makespan  # 1W0 runs beside 0I0.
    assert 2 + 2 * 1.5 == simulate(fuse_backward(split), costs).makespan


@pytest.mark.parametrize(("saving", "expected"), [(0.0, 7.0), (0.25, 6.5), (1.0, 5.0)])
def test_overlapped_pair_saves_a_share_of_its_shorter_half(saving: float, expected: float) -> None:
    orders = [[Forward(0, 0), Overlap(Forward(0, 1), Backward(0, 0)), Backward(0, 1)]]
    schedule = Schedule(orders, Placement.linear(1), 2)
    for forward, backward in ((2.0, 5.0), (5.0, 2.0)):
        costs = CostTable(
            forward=[forward],
            backward_input=[backward],
            backward_weight=[0],
            overlap_saving=saving,
        )
        found = times(simulate(schedule, costs))
        start, end = found["(0F1;0B0)OVERLAP_F_B"]
        assert expected == end - start


def test_overlapped_pair_waits_for_both_inputs_and_hands_on_both_results_at_its_end() -> None:
    orders = [
        [Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)],
        [Forward(1, 0), Overlap(Forward(1, 1), BackwardInput(1, 0)), BackwardWeight(1, 0)],
        [Forward(2, 0), Backward(2, 0), Forward(2, 1), Backward(2, 1)],
    ]
    orders[1] += [Backward(1, 1)]
    schedule = Schedule(orders, Placement.linear(3), 2)
    found = times(simulate(schedule, CostTable.uniform(3)))
    assert (5, 7) == found["(1F1;1I0)OVERLAP_F_B"]  # 1F1 could start at 2, 1I0 at 5.
    assert (7, 8) == found["2F1"]
    assert (7, 9) == found["0B0"]


def test_blocking_send_keeps_its_rank_until_the_message_has_arrived() -> None:
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1\n")
    costs = CostTable.uniform(2, delay=3, message_bytes=2, bandwidth=1)
    expected = {
        "0F0": (0, 1),
        "0SEND_F0": (1, 6),
        "0F1": (6, 7),
        "0SEND_F1": (7, 12),
        "1RECV_F0": (0, 6),
        "1F0": (6, 7),
        "1RECV_F1": (7, 12),
        "1F1": (12, 13),
    }
    report = simulate(schedule, costs, blocking=True)
    assert expected == times(report)
    assert 13 == report.makespan
    assert [2, 2] == [rank.busy for rank in report.ranks]
    assert 13 == report.ranks[0].idle.total + report.ranks[0].busy
    assert (12, 12) == (report.ranks[0].last_end, report.ranks[0].span)  # With its last send.


def test_overlapped_comms_keep_no_rank_busy() -> None:
    schedule = add_comms(Schedule.from_csv("0F0,0F1\n1F0,1F1\n"))
    found = times(simulate(schedule, CostTable.uniform(2, delay=3)))
    assert (1, 1) == found["0SEND_F0"]
    assert (1, 2) == found["0F1"]
    assert (0, 0) == found["1RECV_F0"]
    assert (4, 5) == found["1F0"]


def test_message_leaves_with_its_send_if_that_comes_late() -> None:
    late = Schedule.from_csv("0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n")
    assert (2, 3) == times(simulate(late))["1F0"]


def test_blocking_receive_before_the_send_that_the_other_rank_waits_for_is_rejected() -> None:
    """A receive that is only posted is no harm; one that is waited for is a deadlock."""
    schedule = Schedule.from_csv(
        "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    )
    assert 6 == simulate(schedule).makespan
    with pytest.raises(ScheduleError, match="waits forever"):
        simulate(schedule, blocking=True)


def test_schedule_that_breaks_a_rule_is_rejected_before_it_is_simulated() -> None:
    with pytest.raises(ScheduleError, match="0B0 runs before 0F0"):
        simulate(Schedule.from_csv("0B0,0F0\n"))


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
def test_ranks_that_wait_for_each_other_are_rejected(blocking: bool) -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="rank 0, position 1: 0B0 waits forever"):
        simulate(schedule, blocking=blocking)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_costs_of_another_number_of_stages_are_rejected(num_stages: int) -> None:
    message = (
        f"The costs are for {num_stages} stages, but the schedule has 2. Give costs for each stage."
    )
    with pytest.raises(CostError, match=f"^{re.escape(message)}$"):
        simulate(Schedule.from_csv(TWO_RANKS), CostTable.uniform(num_stages))


def test_costs_left_out_are_one_for_each_rank_however_many_stages_it_holds() -> None:
    placement = Placement([0, 1, 1, 0, 0])
    forward_only = schedules.get("ForwardOnly")
    assert 5 == simulate(forward_only(num_ranks=2, num_microbatches=4)).makespan
    orders = [
        [Forward(stage, 0) for stage in placement.stages_of(rank)]
        + [Backward(stage, 0) for stage in reversed(placement.stages_of(rank))]
        for rank in range(2)
    ]
    report = simulate(Schedule(orders, placement, 1))
    assert [pytest.approx(3)] * 2 == [rank.busy for rank in report.ranks]
    assert 1 == pytest.approx(report.peak_memory)


def test_costs_of_zero_take_no_time() -> None:
    zero = CostTable.uniform(4, forward=0, backward_input=0, backward_weight=0, after_forward=0)
    report = simulate(schedules.get("ZB-H1")(num_ranks=4, num_microbatches=5), zero)
    assert 0 == report.makespan == report.span
    assert 0 == report.bubble_by_makespan == report.bubble_by_span
    assert [0] * 4 == [rank.idle.total for rank in report.ranks]


def test_huge_costs_keep_their_proportions() -> None:
    schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    huge = CostTable.uniform(4, forward=2.0**1000, backward_input=2.0**1000, delay=2.0**1000)
    small = CostTable.uniform(4, delay=1, backward_weight=2.0**-1000)
    expected = simulate(schedule, small).bubble_by_makespan
    assert math.isclose(expected, simulate(schedule, huge).bubble_by_makespan)


def test_single_stage_has_no_bubble() -> None:
    for generator in REGISTRY:
        if generator.stages_per_rank == 1:
            report = simulate(generator(num_ranks=1, num_microbatches=7))
            assert 0 == report.bubble_by_makespan == report.bubble_by_span


@every_generator
def test_schedule_with_comms_takes_as_long_as_without(generator: Generator) -> None:
    for shape in shapes(generator, ranks=[1, 3, 4], microbatches=[1, 5, 8]):
        schedule = make(generator, shape)
        costs = uneven_costs(schedule.num_stages)
        expected = times(simulate(schedule, costs))
        with_comms = simulate(add_comms(schedule), costs)
        found = times(with_comms)
        assert expected == {action: found[action] for action in expected}, shape
        assert simulate(schedule, costs).ranks == with_comms.ranks, shape


@every_generator
def test_blocking_is_slower_where_there_are_messages(generator: Generator) -> None:
    for shape in shapes(generator, ranks=[1, 3], microbatches=[1, 7]):
        schedule = make(generator, shape)
        costs = uneven_costs(schedule.num_stages)
        overlapped = simulate(schedule, costs).makespan
        blocking = simulate(schedule, costs, blocking=True).makespan
        assert blocking == overlapped if shape.p == 1 else blocking >= overlapped, shape
        free = uneven_costs(schedule.num_stages, delay=0.0, message_bytes=0.0)
        expected = simulate(schedule, free).makespan
        assert expected == simulate(schedule, free, blocking=True).makespan, shape


@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_no_schedule_beats_the_lower_bounds(delay: float) -> None:
    f, i, w, c = 1.0, 1.5, 0.75, delay
    tried = [
        make(generator, shape)
        for generator in REGISTRY
        for shape in shapes(generator, ranks=[1, 3, 5], microbatches=[1, 5, 12])
        if shape.v == 1
    ]
    for schedule in filter(trains, tried):
        p, m = schedule.num_ranks, schedule.num_microbatches
        costs = CostTable.uniform(p, forward=f, backward_input=i, backward_weight=w, delay=c)
        report = simulate(schedule, costs)
        work = m * (f + i + w)
        k = min(m, math.floor(report.peak_memory))
        assert report.makespan >= (p - 1) * (f + c) + work
        assert report.span >= work + max(0, (p - 1) * (i + 2 * c) + (p - k) * f)


def test_lower_bounds_are_reached() -> None:
    """So that the test above would notice a simulator that is too fast."""
    p, m = 4, 12
    report = simulate(schedules.get("ZB-H2")(num_ranks=p, num_microbatches=m))
    assert (p - 1) + 3 * m == report.makespan
    assert 3 * m == report.span


@pytest.mark.parametrize(
    ("costs", "starts"),
    [
        # 0F1's message keeps the channel from 5 to 9; that of 2F0 is empty and waits for it.
        ({"message_bytes": [4, 0, 0], "bandwidth": 1}, (5, 9)),
        # 0F1's message is under way from 2 to 9; that of 2F0 takes no time, and still waits.
        ({"delay": [7, 0, 0]}, (8, 9)),
    ],
    ids=["size", "delay"],
)
def test_message_does_not_overtake_another_on_its_channel(
    costs: dict[str, object], starts: tuple[float, float]
) -> None:
    orders = [
        [Forward(0, 0), Forward(0, 1), Forward(2, 0), Forward(2, 1)],
        [Forward(1, 0), Forward(3, 0), Forward(1, 1), Forward(3, 1)],
    ]
    schedule = Schedule(orders, Placement.loop(2, stages_per_rank=2), 2)
    table = CostTable(
        forward=[1, 0, 0, 0], backward_input=[1] * 4, backward_weight=[1] * 4, **costs
    )
    assert starts == simulate(schedule, table).timeline.starts[1][:2]
