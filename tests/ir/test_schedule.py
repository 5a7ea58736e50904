"""A schedule is a value: what it is equal to, how it is shown, and what cannot be made."""

import pickle
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Backward, Forward, Message, Overlap, Placement, Schedule, Send
from penstock.passes import add_comms

TEXT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_schedules_are_equal_if_orders_placement_and_microbatches_are() -> None:
    schedule = Schedule.from_csv(TEXT)
    assert Schedule.from_csv(TEXT) == schedule
    assert hash(Schedule.from_csv(TEXT)) == hash(schedule)
    assert Schedule(schedule.orders[::-1], schedule.placement, 2) != schedule
    assert Schedule(schedule.orders, Placement([1, 0]), 2) != schedule
    assert Schedule(schedule.orders, schedule.placement, 3) != schedule
    assert schedule != TEXT


def test_schedule_takes_any_iterables() -> None:
    orders = (iter([action]) for action in (Forward(0, 0), Forward(1, 0)))
    schedule = Schedule(orders, Placement.linear(2), 1)
    assert ((Forward(0, 0),), (Forward(1, 0),)) == schedule.orders


def test_schedule_counts_what_it_holds() -> None:
    schedule = add_comms(Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"))
    assert 2 == schedule.num_ranks
    assert 4 == schedule.num_stages
    assert 1 == schedule.num_microbatches
    assert 16 == schedule.num_actions


def test_schedule_knows_whether_it_has_communication() -> None:
    schedule = Schedule.from_csv(TEXT)
    assert not schedule.has_comms
    assert add_comms(schedule).has_comms
    assert Schedule([[Send(Message(0, 1, 0))]], Placement([0]), 1).has_comms


def test_schedule_cannot_be_changed() -> None:
    schedule = Schedule.from_csv(TEXT)
    with pytest.raises(AttributeError):
        schedule.orders = ()  # type: ignore[misc]
    assert TEXT == schedule.to_csv()


def test_schedule_can_go_to_another_process() -> None:
    schedule = add_comms(Schedule.from_csv(TEXT))
    assert schedule == pickle.loads(pickle.dumps(schedule))


@pytest.mark.parametrize(
    ("schedule", "shown"),
    [
        (Schedule.from_csv(TEXT), "Schedule(2 ranks, 2 stages, 2 microbatches, 8 actions)"),
        (Schedule.from_csv("0F0\n"), "Schedule(1 rank, 1 stage, 1 microbatch, 1 action)"),
    ],
    ids=["several", "one"],
)
def test_repr_is_short(schedule: Schedule, shown: str) -> None:
    assert shown == repr(schedule)


@pytest.mark.parametrize("count", [1, 3])
def test_other_than_one_order_per_rank_is_rejected(count: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule([[Forward(0, 0)]] * count, Placement.linear(2), 1)
    assert (
        f"There are {count} orders, but the placement has 2 ranks. Give one order for each rank."
    ) == str(caught.value)


def test_schedule_without_microbatches_is_rejected() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule([[Forward(0, 0)]], Placement.linear(1), 0)
    assert "num_microbatches is 0. Expected a whole number, at least 1." == str(caught.value)


def test_order_with_something_other_than_actions_is_rejected() -> None:
    order: list[Any] = [Forward(0, 0), None, (0, 0)]
    with pytest.raises(ScheduleError) as caught:
        Schedule([order], Placement.linear(1), 1)
    assert (
        "An order holds NoneType, tuple, which is not an action. "
        "Use the types of penstock.ir, such as Forward(0, 1)."
    ) == str(caught.value)


def test_schedule_verifies_itself() -> None:
    schedule = Schedule([[Forward(0, 0), Backward(0, 1)]], Placement.linear(1), 2)
    with pytest.raises(ScheduleError, match="rank 0, position 1: 0B1 runs before 0F1"):
        schedule.verify()
    Schedule([[Forward(0, 0), Backward(0, 0)]], Placement.linear(1), 1).verify()


def test_overlap_counts_as_one_action() -> None:
    order = [Forward(0, 0), Overlap(Forward(0, 1), Backward(0, 0)), Backward(0, 1)]
    assert 3 == Schedule([order], Placement.linear(1), 2).num_actions


@pytest.mark.parametrize(
    ("order", "adds_in_order"),
    [
        ("0F0,0F1,0I0,0I1,0W0,0W1", True),
        ("0F0,0F1,0I0,0I1,0W1,0W0", False),
        ("0F0,0F1,0I0,0B1,0W0", False),
        ("0F0,1F0,1B0,0F1,1F1,1B1,0B0,0B1", True),
    ],
)
def test_order_in_which_weight_gradients_are_added_is_known(
    order: str, adds_in_order: bool
) -> None:
    assert adds_in_order == Schedule.from_csv(order).adds_in_order
