"""Orders that are made when they are asked for: equal to the tuple, in all that a value does."""

import copy
import pickle

import pytest

from penstock import Schedule, schedules
from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    Forward,
    LazyOrders,
    Message,
    Overlap,
    Placement,
    Send,
    Unshard,
)
from penstock.ir.lazy_orders import Order
from penstock.schedules.registry import REGISTRY

PLAIN: tuple[Order, ...] = tuple((Forward(rank, 0), Backward(rank, 0)) for rank in range(3))


def _counting() -> tuple[LazyOrders, list[int]]:
    """Lazy orders, and the ranks whose orders were made."""
    made: list[int] = []

    def make(rank: int) -> Order:
        made.append(rank)
        return PLAIN[rank]

    return LazyOrders(3, make, lambda rank, order: range(len(order))), made


def test_order_is_made_when_it_is_first_asked_for_and_kept() -> None:
    orders, made = _counting()
    schedule = Schedule(orders, Placement.linear(3), 1)
    assert 3 == schedule.num_ranks
    assert [] == made
    assert PLAIN[1] == schedule.orders[1]
    assert schedule.orders[1] is schedule.orders[-2]
    assert [1] == made
    assert schedule.has_backward
    assert [1, 0] == made


def test_sequence_is_that_of_the_tuple() -> None:
    orders, _ = _counting()
    assert PLAIN == tuple(orders)
    assert PLAIN[1:] == orders[1:]
    assert PLAIN[::-1] == orders[::-1] == tuple(reversed(orders))
    assert PLAIN[1] in orders
    assert 2 == orders.index(PLAIN[2])
    assert repr(PLAIN) == repr(orders)
    for index in (3, -4):
        with pytest.raises(IndexError):
            orders[index]


def test_equality_and_hash_are_those_of_the_tuple() -> None:
    orders, _ = _counting()
    others, _ = _counting()
    for same in (PLAIN, others):
        assert orders == same
        assert same == orders
        assert hash(orders) == hash(same)
    for different in (PLAIN[:2], PLAIN[::-1], list(PLAIN), LazyOrders(3, lambda rank: PLAIN[0])):
        assert orders != different
        assert different != orders


@pytest.mark.parametrize("name", schedules.names())
def test_schedule_is_the_value_that_it_is_as_a_tuple(name: str) -> None:
    lazy = schedules.get(name)(num_ranks=3, num_microbatches=6)
    assert isinstance(lazy.orders, LazyOrders)
    plain = Schedule(tuple(lazy.orders), lazy.placement, 6)
    assert isinstance(plain.orders, tuple)
    assert plain == lazy
    assert lazy == plain
    assert hash(plain) == hash(lazy)
    for form in (str, repr, Schedule.to_csv):
        assert form(plain) == form(lazy)  # type: ignore[operator]
    names = ("has_backward", "adds_in_order", "has_comms", "has_sharding", "skips", "num_actions")
    for each in names:
        assert getattr(plain, each) == getattr(lazy, each)
    for again in (pickle.loads(pickle.dumps(lazy)), copy.deepcopy(lazy), copy.copy(lazy)):
        assert lazy == again
        again.verify(rank=1)
    assert lazy == lazy.with_orders(lazy.orders) == Schedule.from_csv(lazy.to_csv())


def test_schedule_that_is_unpickled_has_plain_orders() -> None:
    """The functions that made them may be lambdas, or unknown to the other process."""
    orders, _ = _counting()
    assert isinstance(pickle.loads(pickle.dumps(orders)), tuple)


def test_every_registered_schedule_can_be_proved_in_parts() -> None:
    for generator in REGISTRY:
        orders = generator(num_ranks=2, num_microbatches=4).orders
        assert isinstance(orders, LazyOrders)
        assert orders.has_stamps


@pytest.mark.parametrize("action", [Send(Message(0, 1, 0)), Unshard(0), "0F0"])
def test_action_that_is_not_a_compute_is_refused(action: Action) -> None:
    orders = LazyOrders(2, lambda rank: [Forward(rank, 0), action])
    schedule = Schedule(orders, Placement.linear(2), 1)
    kind = type(action).__name__
    with pytest.raises(ScheduleError, match=f"the order of rank 0 holds {kind}, but it is made"):
        schedule.verify()


def test_another_number_of_stamps_than_of_actions_is_refused() -> None:
    orders = LazyOrders(3, PLAIN.__getitem__, lambda rank, order: [0])
    schedule = Schedule(orders, Placement.linear(3), 1)
    with pytest.raises(ScheduleError, match="rank 2 has 2 actions, but 1 stamps"):
        schedule.verify(rank=2)


def test_another_number_of_orders_than_of_ranks_is_refused() -> None:
    orders, _ = _counting()
    with pytest.raises(ScheduleError, match="There are 3 orders, but the placement has 2 ranks"):
        Schedule(orders, Placement.linear(2), 1)


def test_reduced_orders_keep_their_stamps() -> None:
    order = (Forward(0, 0), Overlap(Forward(0, 1), Backward(0, 0)), Backward(0, 1))
    orders = LazyOrders(1, lambda rank: order, lambda rank, order: [3, 5, 8])
    reduced = orders.reduced(lambda order: [Forward(0, 0), Forward(0, 1)])
    assert (Forward(0, 0), Forward(0, 1)) == reduced[0]
    assert (3, 5) == reduced.stamps_of(0)
    assert not LazyOrders(1, lambda rank: order).reduced(lambda order: order).has_stamps
