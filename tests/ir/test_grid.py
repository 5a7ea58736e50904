"""`str()` of a schedule draws it, whether it can be run or not."""

import pytest

from penstock.ir import (
    Action,
    BackwardInput,
    Forward,
    Message,
    Placement,
    Schedule,
    Send,
)
from penstock.passes import add_comms

DRAWINGS = {
    "one action": ("0F0\n", "rank 0  0F0"),
    "1F1B": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "rank 0  0F0 0F1 .   0B0 .   0B1\n"
        "rank 1  .   1F0 1B0 1F1 1B1",
    ),
    "split backward": (
        "0F0,0I0,0W0\n1F0,1I0,1W0\n",
        "rank 0  0F0 .   .   0I0 0W0\n"
        "rank 1  .   1F0 1I0 1W0",
    ),
    "V placement": (
        "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n",
        "rank 0  0F0 .   .   3F0 3B0 .   .   0B0\n"
        "rank 1  .   1F0 2F0 .   .   2B0 1B0",
    ),
    "overlap": (
        "0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,0B0,1B1,0B1\n",
        "rank 0  0F0     0F1     1F0     1F1&1B0 0B0     1B1     0B1",
    ),
    "overlap of an input backward": (
        "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n",
        "rank 0  0F0     0F1&0I0 0W0     0B1",
    ),
    "gathers, frees and reductions": (
        "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD\n1UNSHARD,1F0,1B0,1RESHARD\n",
        "rank 0  0F0 .   .   0B0\n"
        "rank 1  .   1F0 1B0",
    ),
    "all ranks stalled": (
        "0B0,0F0\n1F0,1B0\n",
        "rank 0  !   0B0 0F0\n"
        "rank 1  !   1F0 1B0",
    ),
    "one rank stalled": (
        "0F0,0B0\n1F0\n",
        "rank 0  0F0 !   0B0\n"
        "rank 1  .   1F0",
    ),
    "missing forward": (
        "0F0,0F1\n1F0,1F2,1F1\n",
        "rank 0  0F0 0F1\n"
        "rank 1  .   1F0 !   1F2 1F1",
    ),
    "stalled in an overlap": (
        "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n",
        "rank 0  0F0     !       0F1&0B0 0B1\n"
        "rank 1  .       1F0     !       1F1     1B0     1B1",
    ),
    "rank that only lacks a send": (
        "0F0\n1RECV_F0,1F0\n",
        "rank 0  0F0\n"
        "rank 1  !   1F0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "drawing"), DRAWINGS.values(), ids=list(DRAWINGS))
def test_drawing_shows_idle_time_and_what_waits_for_ever(text: str, drawing: str) -> None:
    assert drawing == str(Schedule.from_csv(text))


def test_communication_takes_no_time_in_the_drawing() -> None:
    text, drawing = DRAWINGS["V placement"]
    assert drawing == str(add_comms(Schedule.from_csv(text)))


def test_send_behind_another_action_delivers_after_it() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n")
    assert "rank 0  0F0 0F1\nrank 1  .   .   1F0 1F1" == str(schedule)


def test_labels_of_eleven_ranks_are_aligned() -> None:
    orders = [[Forward(0, 0)], [Forward(1, 0)], *([] for _ in range(9))]
    lines = str(Schedule(orders, Placement(range(11)), 1)).splitlines()
    assert ["rank 0   0F0", "rank 1   .   1F0"] == lines[:2]
    assert "rank 10" == lines[10].rstrip()


@pytest.mark.parametrize("action", [Forward(-1, 0), Forward(0, 3)], ids=str)
def test_schedule_with_an_action_out_of_range_is_drawn_as_not_run(action: Action) -> None:
    schedule = Schedule([[Forward(0, 0), action]], Placement([0, 0]), 1)
    assert f"rank 0  ! 0F0 {action}" == " ".join(str(schedule).split()).replace("0 !", "0  !")


@pytest.mark.parametrize("order", [[], [Send(Message(0, 1, 0))]], ids=["empty", "communication"])
def test_schedule_without_computes_is_drawn(order: list[Action]) -> None:
    assert "rank 0" == str(Schedule([order], Placement.linear(1), 1)).rstrip()


@pytest.mark.parametrize("action", [Forward(5, 0), BackwardInput(2, 0)], ids=str)
def test_action_of_a_stage_that_does_not_exist_is_drawn(action: Action) -> None:
    assert str(action) in str(Schedule([[action]], Placement([0, 0]), 1))


def test_two_ranks_that_wait_for_the_same_input_both_get_it() -> None:
    orders = [[Forward(1, 0)], [Forward(1, 0)], [Forward(0, 0)]]
    schedule = Schedule(orders, Placement([2, 1, 0]), 1)
    assert "rank 0  .   1F0\nrank 1  .   1F0\nrank 2  0F0" == str(schedule)
