"""The walk runs every action once, in an order that ranks could run, or shows who waits."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.ir.walking import walk
from penstock.passes import add_comms
from penstock.schedules import REGISTRY
from penstock.schedules.generator import Generator

RULE = (
    "Ranks must not wait for each other in a circle. "
    "Move a marked action after those that the other ranks wait for."
)


def cells_of(schedule: Schedule, *, blocking: bool = False) -> list[str]:
    return [str(action) for _, action, _, _ in walk(schedule, blocking=blocking)]


def error_of(text: str, *, blocking: bool = False) -> str:
    with pytest.raises(ScheduleError) as caught:
        list(walk(Schedule.from_csv(text), blocking=blocking))
    return str(caught.value)


@pytest.mark.parametrize("with_comms", [False, True])
@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
def test_walk_keeps_the_orders_and_delivers_before_it_uses(
    generator: Generator, with_comms: bool
) -> None:
    schedule = generator(num_ranks=3, num_microbatches=6)
    if with_comms:
        schedule = add_comms(schedule)
    orders: list[list[object]] = [[] for _ in schedule.orders]
    delivered: set[int] = set()
    for rank, action, needed, new in walk(schedule):
        orders[rank].append(action)
        assert delivered.issuperset(needed)
        assert delivered.isdisjoint(new)
        delivered.update(new)
    assert schedule.orders == tuple(map(tuple, orders))


def test_rank_runs_on_until_it_must_wait() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    cells = cells_of(schedule)
    assert ["0F0", "0F1"] == cells[:2]
    assert sorted(schedule.to_csv().replace("\n", ",").strip(",").split(",")) == sorted(cells)


def test_stall_shows_the_circle_and_leaves_out_who_only_waits_for_it() -> None:
    text = "0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n2F0,2F1,2B1,2B0\n"
    assert (
        "rank 1, position 1: 1B1 waits forever\n"
        "  rank 1: 1F0 >1B1< 1F1 1B0\n"
        "    waits for the gradient of microbatch 1 from stage 2 on rank 2\n"
        "  rank 2: 2F0 >2F1< 2B1 2B0\n"
        "    waits for the activation of microbatch 1 from stage 1 on rank 1\n"
        f"{RULE}"
    ) == error_of(text)


def test_stall_of_three_ranks_starts_at_the_smallest() -> None:
    text = "1F0,5F0\n3F0,0F0\n2F0,4F0\n"
    assert (
        "rank 0, position 0: 1F0 waits forever\n"
        "  rank 0: >1F0< 5F0\n"
        "    waits for the activation of microbatch 0 from stage 0 on rank 1\n"
        "  rank 1: >3F0< 0F0\n"
        "    waits for the activation of microbatch 0 from stage 2 on rank 2\n"
        "  rank 2: >2F0< 4F0\n"
        "    waits for the activation of microbatch 0 from stage 1 on rank 0\n"
        f"{RULE}"
    ) == error_of(text)


def test_circle_that_is_entered_in_the_middle_starts_at_its_smallest_rank() -> None:
    # Rank 0 waits for rank 2, which waits for rank 1, which waits for rank 2.
    message = error_of("4F0\n2F0,0F0\n1F0,3F0\n")
    assert message.startswith("rank 1, position 0: 2F0 waits forever\n  rank 1: >2F0< 0F0\n")
    assert "  rank 0:" not in message
    assert message.index("  rank 1:") < message.index("  rank 2:")


def test_rank_that_waits_for_itself_is_told_to_move_the_action() -> None:
    assert (
        "rank 0, position 0: 1F0 waits forever\n"
        "  rank 0: >1F0< 0F0\n"
        "    waits for the activation of microbatch 0 from stage 0 on rank 0\n"
        "The inputs of an action must be made first. Move it later, or add what is missing."
    ) == error_of("1F0,0F0\n")


def test_rank_that_nobody_serves_is_shown_alone() -> None:
    assert (
        "rank 1, position 0: 1F1 waits forever\n"
        "  rank 1: >1F1<\n"
        "    waits for the activation of microbatch 1 from stage 0 on rank 2\n"
        "The inputs of an action must be made first. Move it later, or add what is missing."
    ) == error_of("2F1\n1F1\n0F0\n")


def test_overlap_waits_for_both_of_its_inputs() -> None:
    assert "    waits for the gradient of microbatch 0 from stage 1 on rank 1\n" in error_of(
        "0F0,(0F1;0B0)OVERLAP_F_B\n1F0,1F1,1B0\n"
    )
    assert "    waits for the activation of microbatch 1 from stage 0 on rank 0\n" in error_of(
        "0F0,0B0,0F1\n1F0,(1F1;1B0)OVERLAP_F_B\n"
    )


# Rank 1 posts both receives at once; rank 0 needs a gradient before it sends the second.
EARLY_RECEIVE = (
    "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
    "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
)


def test_receive_is_posted_and_does_not_wait() -> None:
    schedule = Schedule.from_csv(EARLY_RECEIVE)
    assert schedule.num_actions == len(cells_of(schedule))


def test_receive_waits_for_its_message_if_blocking() -> None:
    assert (
        "rank 0, position 2: 0RECV_B0 waits forever\n"
        "  rank 0: 0F0 0SEND_F0 >0RECV_B0< 0B0 0F1 0SEND_F1 0RECV_B1 …\n"
        "    waits for the gradient of microbatch 0 from stage 1 on rank 1\n"
        "  rank 1: 1RECV_F0 >1RECV_F1< 1F0 1B0 1SEND_B0 1F1 …\n"
        "    waits for the activation of microbatch 1 from stage 0 on rank 0\n"
        f"{RULE}"
    ) == error_of(EARLY_RECEIVE, blocking=True)


def test_blocking_walk_goes_through_if_each_receive_is_served() -> None:
    schedule = add_comms(Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"))
    cells = cells_of(schedule, blocking=True)
    assert schedule.num_actions == len(cells)
    assert cells.index("0SEND_F1") < cells.index("1RECV_F1")


def test_value_waits_for_its_send_if_there_is_communication() -> None:
    assert "1F0 waits forever" in error_of("0F0\n1RECV_F0,1F0\n")
    assert ["0F0", "1F0"] == cells_of(Schedule.from_csv("0F0\n1F0\n"))


def test_value_for_the_same_rank_needs_no_send() -> None:
    cells = cells_of(Schedule.from_csv("0F0,0SEND_F0\n1RECV_F0,1F0,2F0\n"))
    assert ["0F0", "0SEND_F0"] == [cell for cell in cells if cell.startswith("0")]
    assert "2F0" == cells[-1]
