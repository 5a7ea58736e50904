"""Prove on one rank that no ranks wait for each other in a circle, without the other orders.

The algorithm gives every F, I and B a number, its stamp. A rank checks that

1. stamps grow along its own order; W and R do not count, as no other rank waits for them,
2. the maker of every message that it needs has a smaller stamp.

In a circle of waits, each action waits for one before it on its rank, or for the maker of a
message. If every rank has checked its part, stamps grow along all of these, and no circle closes.
Values that skip stages add none: see `Dataflow`.
"""

from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.ir import BackwardWeight, Forward, LazyOrders, Rank, Recompute, Schedule
from penstock.ir.action import BACKWARD_TYPES, compute_parts
from penstock.ir.dataflow import Dataflow
from penstock.ir.excerpts import error_at
from penstock.ir.lazy_orders import Order

_RULE = (
    "Stamps must grow along each order, and from the maker of a message to its taker. "
    "The schedule can run: mend the stamps of its LazyOrders, or leave them out."
)


def has_stamps(schedule: Schedule) -> bool:
    """Return whether a rank can prove its own part."""
    return isinstance(schedule.orders, LazyOrders) and schedule.orders.has_stamps


def find_unproved(schedule: Schedule, rank: Rank) -> ScheduleError | None:
    """Return an error for the first action of `rank` that stamps do not prove to run.

    Rules 1 and 2 of `verify` must hold on that rank.
    """
    orders = schedule.orders
    assert isinstance(orders, LazyOrders)
    flow = Dataflow(schedule)
    order = orders[rank]
    partners = flow.partners(rank)
    made = _stamps_of_makers(orders, [rank, *partners])
    previous: int | None = None
    for position, (action, stamp) in enumerate(zip(order, orders.stamps_of(rank), strict=True)):
        if isinstance(action, BackwardWeight | Recompute):
            continue
        late = ""
        if previous is not None and stamp <= previous:
            late = f"the action before it has {previous}"
        for message in flow.needed(action):
            before = made.get((message.is_gradient, message.maker, message.mb))
            if not late and (before is None or before >= stamp):
                late = (
                    f"stage {message.maker} on rank {flow.sender(message)}, which makes the "
                    f"{message.kind} that it needs, has {'none' if before is None else before}"
                )
        if late:
            wrong = f"{action} has stamp {stamp}, but {late}"
            return error_at(orders, rank, position, wrong, _RULE)
        previous = stamp
    for other in partners:
        if _has_backward(order) != _has_backward(orders[other]):
            wrong = f"of ranks {rank} and {other}, one has backwards"
            return error_at(orders, rank, len(order), wrong, _RULE)
    return None


def _stamps_of_makers(
    orders: LazyOrders, ranks: Iterable[Rank]
) -> dict[tuple[bool, int, int], int]:
    """Return the stamps of what these ranks compute: whether it is a backward, stage, microbatch.

    That also says which messages it makes.
    """
    return {
        (not isinstance(part, Forward), part.stage, part.mb): stamp
        for rank in ranks
        for action, stamp in zip(orders[rank], orders.stamps_of(rank), strict=True)
        if not isinstance(action, BackwardWeight | Recompute)
        for part in compute_parts(action)
    }


def _has_backward(order: Order) -> bool:
    return any(
        isinstance(part, BACKWARD_TYPES) for action in order for part in compute_parts(action)
    )
