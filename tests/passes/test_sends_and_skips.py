"""Where sends and receives are placed, and that they can be taken out again."""

from itertools import product

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Overlap, Placement, Schedule
from penstock.passes import add_comms, add_sends, remove_comms, split_backward, verify
from penstock.schedules import REGISTRY
from penstock.schedules.generator import Generator

PLACED = {
    "one rank": ("0F0,1F0,1B0,0B0\n", "0F0,1F0,1B0,0B0\n"),
    "1F1B": (
        "0F0,0F1,0B0,0B1\n"
        "1F0,1B0,1F1,1B1\n",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
    ),
    "split backward": (
        "0F0,0I0,0W0\n"
        "1F0,1I0,1W0\n",
        "0F0,0SEND_F0,0RECV_B0,0I0,0W0\n"
        "1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
    ),
    "V placement": (
        "0F0,3F0,3B0,0B0\n"
        "1F0,2F0,2B0,1B0\n",
        "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0\n",
    ),
    "loop placement": (
        "0F0,2F0,2B0,0B0\n"
        "1F0,3F0,3B0,1B0\n",
        "0F0,0SEND_F0,2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,1RECV_B0,1B0,1SEND_B0\n",
    ),
    "explicit placement": (
        "1F0,1B0\n"
        "2F0,2B0\n"
        "0F0,3F0,3B0,0B0\n",
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n"
        "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0\n"
        "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0\n",
    ),
    "overlap": (
        "0F0,0F1,0B0,0B1\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,1B1\n",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1\n",
    ),
    "overlap in the middle": (
        "0F0,0F1,0B0,0B1\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
        "2F0,2B0,2F1,2B1\n",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1RECV_B0,(1F1;1B0)OVERLAP_F_B,1SEND_F1,1SEND_B0,"
        "1RECV_B1,1B1,1SEND_B1\n"
        "2RECV_F0,2F0,2B0,2SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1\n",
    ),
    "receive posted before it is needed, as it was sent first": (
        "0F0,0F1\n"
        "1F1,1F0\n",
        "0F0,0SEND_F0,0F1,0SEND_F1\n"
        "1RECV_F0,1RECV_F1,1F1,1F0\n",
    ),
    "inference": ("0F0\n1F0\n", "0F0,0SEND_F0\n1RECV_F0,1F0\n"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "placed"), PLACED.values(), ids=list(PLACED))
def test_sends_come_right_after_and_receives_before(text: str, placed: str) -> None:
    assert placed == add_comms(Schedule.from_csv(text)).to_csv()
    assert text == remove_comms(Schedule.from_csv(placed)).to_csv()


SHAPES = [(1, 4), (2, 4), (3, 6), (4, 8)]


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
def test_every_message_between_ranks_is_sent_and_received_once(
    generator: Generator, p: int, m: int
) -> None:
    schedule = generator(num_ranks=p, num_microbatches=m)
    ranks = schedule.placement.ranks
    directions = "F" if generator.name == "ForwardOnly" else "FB"
    expected = []
    for stage, mb, direction in product(range(len(ranks) - 1), range(m), directions):
        if ranks[stage] != ranks[stage + 1]:
            sender, receiver = (stage, stage + 1) if direction == "F" else (stage + 1, stage)
            expected.append(f"{sender}SEND_{direction}{mb}")
            expected.append(f"{receiver}RECV_{direction}{mb}")
    cells = add_comms(schedule).to_csv().replace("\n", ",").split(",")
    assert sorted(expected) == sorted(cell for cell in cells if "_" in cell and "(" not in cell)


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
def test_result_verifies_and_removing_gives_the_schedule_back(
    generator: Generator, p: int, m: int
) -> None:
    schedule = generator(num_ranks=p, num_microbatches=m)
    for form in (schedule, split_backward(schedule)):
        with_comms = add_comms(form)
        verify(with_comms)
        assert form == remove_comms(with_comms)
        assert (p > 1) == with_comms.has_comms
        assert str(form) == str(with_comms)


def test_schedule_that_has_communication_is_refused() -> None:
    schedule = add_comms(Schedule.from_csv("0F0,0B0\n1F0,1B0\n"))
    with pytest.raises(ScheduleError) as caught:
        add_comms(schedule)
    assert (
        "The schedule already has sends and receives. "
        "Give add_comms a schedule without them, such as remove_comms returns."
    ) == str(caught.value)


def test_schedule_that_does_not_verify_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 0, position 1: 0B1 runs before 0F1"):
        add_comms(Schedule.from_csv("0F0,0B1\n"))


def test_removing_from_a_schedule_without_communication_changes_nothing() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert schedule == remove_comms(schedule)
    assert isinstance(remove_comms(schedule).orders[0][1], Overlap)


def test_removing_keeps_placement_and_microbatches() -> None:
    schedule = Schedule(Schedule.from_csv("0SEND_F0\n1F0\n").orders, Placement([1, 0]), 7)
    removed = remove_comms(schedule)
    assert (Placement([1, 0]), 7) == (removed.placement, removed.num_microbatches)
    assert () == removed.orders[0]


@pytest.mark.parametrize("skip", [(0, 1), (1, 0), (0, 3), (-1, 2)])
def test_skip_that_cannot_be_is_rejected(skip: tuple[int, int]) -> None:
    schedule = Schedule.from_csv("0F0\n1F0\n2F0\n")
    with pytest.raises(ScheduleError, match=r"skips has .* Expected stages from 0 to 2"):
        add_sends(schedule, [skip])
